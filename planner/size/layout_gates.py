"""The steps (gates) of the sizing recipe that choose weights, GPUs and layout, in order.

Each gate reads the draft of a plan, adds one decision to it, and records the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log2

import msgspec

from planner.size.plan_draft import Draft, FleetPlan, RecipeGate, SizingError
from planner.size.replica_times import at_batch
from planner.size.units import gb, ms, usd
from policies.sizing.gpu_memory import MemoryCheck, min_gpus
from policies.sizing.model_shapes import Llm
from policies.sizing.parallel_layout import Layout
from policies.sizing.parallelism_rules import divisors, heads_problem, valid_tp_sizes
from policies.sizing.token_cost import usd_per_million

KNEE = 1.4  # below this gain, twice the GPUs are not worth it
MAX_PP = 16
LONG_PROMPT, LONGER_PROMPT = 100_000, 128_000
MAX_CP = 8


def quantise(
    candidates: Sequence[Llm], plans: Sequence[FleetPlan], problems: Sequence[str], best: FleetPlan
) -> RecipeGate:
    """Return the first gate of a sizing plan: do fp8 weights save GPUs at the same promises?

    plans     a plan for each candidate (own or fp8 weights) that fits
    problems  the reasons why other candidates have no plan
    best      the chosen plan
    """
    numbers = [
        f"{plan.model.name}: {gb(plan.model.weights_bytes)} of weights, {plan.layout.label}, "
        f"{plan.replicas} replica(s), {plan.gpus} GPUs"
        + (f", misses {len(plan.shortfalls)} limit(s)" if plan.shortfalls else "")
        for plan in plans
    ]
    if best.model.weight_bytes >= 2:
        answer = "no: fewer bytes save no GPU" if len(candidates) > 1 else "no: as asked"
        notes: tuple[str, ...] = ()
    else:
        others = [str(plan.gpus) for plan in plans if plan is not best]
        instead = f" instead of {others[0]}" if others else ""
        answer = "the weights are" if len(candidates) == 1 else f"yes: {best.gpus} GPUs{instead}"
        notes = ("validate the quality: penstock golden run compares answers with the original",)
    return RecipeGate(
        1, "Quantise?", (*numbers, *problems), answer, "seed 001 (quantise first), 003", notes
    )


def fits_one(draft: Draft) -> None:
    """Decide whether one GPU has memory for the weights, the requests and some headroom.

    This is the second of eight decisions (gates). Each adds its reason to the draft of the plan.
    """
    check = draft.memory(Layout())
    answer = "yes: TP 1" if check.is_enough else "no"
    draft.add("Does it fit one GPU?", [_memory(check)], answer, "seed 002 (fits? replicate), 003")


def least_tp(draft: Draft) -> None:
    """Choose the smallest possible tensor-parallel size at which the model fits into memory.

    TP must divide the attention heads. This is the third of the eight decisions (gates) of a sizing
    plan.
    """
    numbers: list[str] = []
    chosen = draft.tp_sizes[-1]
    for tp in draft.tp_sizes:
        check = draft.memory(Layout(tp))
        numbers.append(f"TP {tp}: {_memory(check)}")
        if check.is_enough:
            chosen = tp
            break
    draft.layout, draft.least_tp = Layout(chosen), chosen
    holds = draft.memory().is_enough
    answer = f"TP {chosen}" + ("" if holds else ", the largest of a link domain, does not hold it")
    draft.add(
        "What is the least TP that holds it?",
        numbers,
        answer,
        "seeds 001, 002, 003 (weights + KV + 10 to 15 %)",
        *_refused_sizes(draft),
    )


def _refused_sizes(draft: Draft) -> Iterator[str]:
    bound = min_gpus(draft.model, draft.hardware.gpu)
    problem = heads_problem(draft.facts, bound)
    if problem is not None:
        allowed = ", ".join(map(str, draft.tp_sizes))
        yield f"by division {bound} GPUs hold the weights, but {problem}; valid: {allowed}"
    elif bound < draft.layout.tp:
        yield f"by division TP {bound} holds the weights; it is the KV cache that needs more"


def raise_tp(draft: Draft) -> None:
    """Raise a plan's tensor-parallel size until a single request is as fast as promised.

    This is the fourth of the eight decisions (gates) of a sizing plan. A promise that no TP size
    can keep does not raise the size; it is reported.
    """
    sizes = [tp for tp in draft.tp_sizes if tp >= draft.layout.tp]
    limits = draft.work.limits
    reachable = [name for name in limits if any(_missed_s(draft, tp, name) <= 0 for tp in sizes)]
    chosen = next(tp for tp in sizes if all(_missed_s(draft, tp, name) <= 0 for name in reachable))
    draft.layout = Layout(chosen)
    answer = f"TP {chosen}: {'promises are met' if limits else 'no promise of speed'}"
    unreachable = [name for name in limits if name not in reachable]
    if unreachable:
        answer = _unreachable(draft, sizes, unreachable)
    draft.add(
        "Are the promises met at batch 1, or does more TP meet them?",
        list(_ladder(draft, sizes)),
        answer,
        "seeds 000, 002, 004 (TP first, to the knee)",
        "latency-critical is 5 ms per token in seed 000, 38 ms in 003, 100 and 300 ms in 001: "
        "the promises of your classes decide, not a constant",
    )


def _ladder(draft: Draft, sizes: Sequence[int]) -> Iterator[str]:
    last = None
    for tp in sizes:
        single = at_batch(draft.times(Layout(tp)), draft.work, 1)
        gain = "" if last is None else f" (x{last / single.step_s:.2f})"
        last = single.step_s
        missed = _missed(draft, tp) or "met"
        yield f"TP {tp}: {ms(single.step_s)} per token{gain}, TTFT {ms(single.ttft_s)}: {missed}"


def _missed_s(draft: Draft, tp: int, name: str) -> float:
    # Return by how many seconds batch 1 misses a promise; zero or less if it is kept.
    single = at_batch(draft.times(Layout(tp)), draft.work, 1)
    seconds = single.step_s if name == "TPOT" else single.ttft_s
    return seconds - draft.work.limits[name]


def _missed(draft: Draft, tp: int) -> str:
    # Return a text about which promises batch 1 misses, and by how much; empty if none.
    late = {name: _missed_s(draft, tp, name) for name in draft.work.limits}
    return ", ".join(f"misses {name} by {ms(by)}" for name, by in late.items() if by > 0)


def knee_of(draft: Draft, sizes: Sequence[int]) -> int:
    """Return the TP size above which more TP makes decoding hardly faster.

    It is the first of `sizes` at which doubling TP speeds decoding up by less than the factor KNEE.
    """
    for tp, larger in pairwise(sizes):
        slow = draft.times(Layout(tp)).decode_s(1, draft.work.mean_context)
        fast = draft.times(Layout(larger)).decode_s(1, draft.work.mean_context)
        if (slow / fast) ** (1 / log2(larger / tp)) < KNEE:
            return tp
    return sizes[-1]


def _unreachable(draft: Draft, sizes: Sequence[int], names: Sequence[str]) -> str:
    # Choose the TP size if no size keeps a promise, record what is missed, and return the answer.
    #
    # The chosen size is the one that the other promises need. With best effort, it is the size
    # returned by knee_of() if that is larger.
    tp, knee = draft.layout.tp, knee_of(draft, sizes)
    context, price = draft.work.mean_context, draft.hardware.price_hour
    stay, at_knee = (
        usd_per_million(price, size, 1 / draft.times(Layout(size)).decode_s(1, context))
        for size in (tp, knee)
    )
    beside = (
        f"the knee is TP {knee} ({_missed(draft, knee)}), at {usd(at_knee)} instead of "
        f"{usd(stay)} per 1M tokens of batch 1"
    )
    if draft.hardware.is_best_effort:
        tp = max(tp, knee)
        draft.layout = Layout(tp)
    draft.shortfalls.append(
        f"TP {tp} {_missed(draft, tp)} at batch 1: no TP of a link domain keeps "
        f"{' and '.join(names)}, and more GPUs cannot help"
    )
    if draft.hardware.is_best_effort:
        return f"TP {tp}: best effort; {beside}"
    return f"TP {tp} stays: an unreachable promise buys no GPU; {beside} (--best-effort)"


def least_pp(draft: Draft) -> None:
    """Choose a plan's number of pipeline stages: only as many as the memory needs (gate 5)."""
    numbers: list[str] = []
    tp, limit = draft.layout.tp, draft.hardware.gpus
    most = min(MAX_PP, draft.model.layers)
    for pp in range(1, most + 1):
        check = draft.memory(Layout(tp, pp))
        numbers.append(f"TP {tp} x PP {pp}: {_memory(check)}")
        if check.is_enough:
            break
    else:
        raise SizingError(_not_held(draft, most))
    if limit is not None and tp * pp > limit:
        raise SizingError(_too_few_gpus(draft, Layout(tp, pp), limit))
    draft.layout = Layout(tp, pp)
    answer = "no PP" if pp == 1 else f"PP {pp}: the least that holds it"
    draft.add(
        "How many pipeline stages?",
        numbers,
        answer,
        "seeds 000, 001, 004 (PP minimal)",
        *_pp_notes(draft),
    )


def _too_few_gpus(draft: Draft, layout: Layout, limit: int) -> str:
    # Return a text about how many GPUs the model needs.
    #
    # `layout` uses only TP sizes up to the available GPUs. With more GPUs, TP alone may suffice.
    sizes = valid_tp_sizes(draft.facts, draft.hardware.domain)
    enough = [Layout(tp) for tp in sizes if draft.memory(Layout(tp)).is_enough]
    needed = min((*enough, layout), key=lambda each: (each.gpus, each.pp))
    return (
        f"{draft.model.name} needs {needed.gpus} GPUs of type {draft.hardware.gpu.name} "
        f"({needed.label}), but only {limit} are available; give --gpus {needed.gpus} or more"
    )


def _not_held(draft: Draft, most: int) -> str:
    check = draft.memory(Layout(draft.layout.tp, most))
    return (
        f"{draft.model.name} with TP {draft.layout.tp} and up to {most} stages {check.text} on "
        f"{draft.hardware.gpu.name}; valid: a shorter --context, a smaller --max-concurrency, "
        "--headroom or --quant fp8, or GPUs with more memory"
    )


def _pp_notes(draft: Draft) -> Iterator[str]:
    pp, layers = draft.layout.pp, draft.model.layers
    if pp == 1:
        return
    bubble = draft.times().bubble_s(draft.work.uncached)
    yield f"TTFT includes {ms(bubble)} of the other {pp - 1} stage(s)"
    if layers % pp:
        even = ", ".join(map(str, divisors(layers)[:8]))
        yield f"{layers} layers are not divided evenly by {pp}: the largest stage decides ({even})"
    wide = Layout(draft.layout.tp * pp)
    if heads_problem(draft.facts, wide.tp) is None:
        tokens = draft.memory(wide).tokens
        yield (
            f"TP {wide.tp} on the same GPUs would hold {tokens:,} tokens, this layout "
            f"{draft.memory().tokens:,}: TP beyond the KV heads replicates them, and leaves the "
            "link domain"
        )
    yield "seed 000 calls PP rare, 001 calls it the answer across nodes: both are this case"


def most_ep(draft: Draft) -> None:
    """Spread a model's experts over all ranks, and choose how attention is divided among them.

    With MLA, attention is data-parallel. This is the sixth of the eight decisions (gates) of a
    sizing plan.
    """
    source = "seeds 000, 001, 004 (EP maximal for MoE)"
    question = "How are experts spread?"
    experts, tp, pp = draft.model.experts, draft.layout.tp, draft.layout.pp
    if not experts or tp == 1:
        reason = "one GPU holds all experts" if experts else "a dense model has no experts"
        draft.add(question, [], f"EP 1: {reason}", source)
        return
    if experts % tp:
        draft.add(question, [], f"EP 1: {experts} experts cannot be divided by {tp}", source)
        return
    choices = [Layout(tp, pp, ep=tp)]
    if draft.model.mla:
        choices.append(Layout(1, pp, ep=tp, dp=tp))
    numbers = [f"{choice.label}: {_memory(draft.memory(choice))}" for choice in choices]
    feasible = [choice for choice in choices if draft.memory(choice).is_enough]
    feasible = (
        [choice for choice in feasible if _keeps_promises(draft, choice)]
        or feasible
        or [draft.layout]
    )
    draft.layout = max(feasible, key=lambda choice: draft.memory(choice).tokens)
    draft.add(
        question,
        numbers,
        draft.layout.label,
        source,
        "seed 000 says EP with TP 1, 004 says TP first: TP 1 is right where attention is MLA, "
        "whose cache TP does not divide",
    )


def _keeps_promises(draft: Draft, layout: Layout) -> bool:
    # Return whether a layout keeps, at batch 1, all promises that the draft's present layout keeps.
    single, now = (at_batch(draft.times(each), draft.work, 1) for each in (layout, draft.layout))
    pairs = {"TPOT": (single.step_s, now.step_s), "TTFT": (single.ttft_s, now.ttft_s)}
    return all(
        pairs[name][0] <= limit or pairs[name][1] > limit
        for name, limit in draft.work.limits.items()
    )


def split_context(draft: Draft) -> None:
    """Divide prompts among several ranks (context parallelism) if very long ones are too slow.

    This is the seventh of the eight decisions (gates) of a sizing plan. It counts the time to the
    first token.
    """
    work, ttft_s = draft.work, draft.times().prefill_s(draft.work.uncached, draft.work.cached)
    if work.prompt < LONG_PROMPT:
        answer = "CP 1: the prompts are short"
    elif work.ttft_s is None or ttft_s <= work.ttft_s:
        answer = "CP 1: TTFT is met"
    else:
        answer = _least_cp(draft, work.ttft_s)
    draft.add(
        "Is context parallelism needed?",
        [f"prompts of {work.prompt:,} tokens, TTFT {ms(ttft_s)} at batch 1"],
        answer,
        "seeds 001, 004",
        f"seed 004 begins at {LONG_PROMPT:,} tokens, 001 at {LONGER_PROMPT:,}, with chunks below",
    )


def _least_cp(draft: Draft, ttft_s: float) -> str:
    work, layout = draft.work, draft.layout
    for cp in (2, 4, MAX_CP):
        wider = msgspec.structs.replace(layout, cp=cp)
        if draft.hardware.gpus is not None and wider.gpus > draft.hardware.gpus:
            break
        if draft.times(wider).prefill_s(work.uncached, work.cached) <= ttft_s:
            draft.layout = wider
            draft.shortfalls = [text for text in draft.shortfalls if "TPOT" in text]
            return f"CP {cp}: the least that meets TTFT"
    return f"CP 1: no CP up to {MAX_CP} on these GPUs meets TTFT"


def _memory(check: MemoryCheck) -> str:
    return f"{gb(check.weights_bytes)} of weights per GPU; {check.text}"
