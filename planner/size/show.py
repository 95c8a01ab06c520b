"""Prints the results of `penstock size`: the steps as text, tables, and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from planner.size.finalist_result import Finalist
from planner.size.pareto_front import FleetPoint, LadderStep
from planner.size.plan_draft import FleetPlan, RecipeGate
from planner.size.units import gb, ms, usd

MAX_REASONS = 12
NOT_CONSIDERED = "Not considered: speculative decoding."


def plan_lines(plan: FleetPlan) -> Iterator[str]:
    """Yield a sizing plan as lines of text: the question, each gate, and the fleet."""
    work, gpu = plan.work, plan.hardware.gpu
    yield (
        f"{plan.model.name} on {gpu.name}: prompts of {work.prompt:,} tokens "
        f"({work.cached:,} cached), answers of {work.output:,}, context {work.context:,}"
    )
    yield f"step times: {_certainty(plan)}"
    for gate in plan.gates:
        yield ""
        yield from _gate_lines(gate)
    yield ""
    yield from _fleet_lines(plan)


def _certainty(plan: FleetPlan) -> str:
    gpu = plan.hardware.gpu
    if plan.is_measured:
        return "measured grid of this model, GPU and TP (interpolated between points: 5 %)"
    prefill, decode = gpu.errors
    base = f"equation, 90 % of points within {prefill:.0%} (prefill) and {decode:.0%} (decode)"
    return f"{base}; constants borrowed from {gpu.fit_of}" if gpu.fit_of else base


def _gate_lines(gate: RecipeGate) -> Iterator[str]:
    yield f"{gate.number}. {gate.question}  [{gate.source}]"
    for line in gate.numbers:
        yield f"     {line}"
    yield f"   -> {gate.answer}"
    for note in gate.notes:
        yield f"      note: {note}"


def _fleet_lines(plan: FleetPlan) -> Iterator[str]:
    loaded, single = plan.loaded, plan.single
    yield (
        f"Fleet: {plan.replicas} x {plan.layout.label} = {plan.gpus} GPUs, "
        f"{usd(plan.usd_hour)} per hour at {usd(plan.hardware.price_hour)} per GPU"
    )
    memory = plan.memory
    yield (
        f"  per GPU {gb(memory.weights_bytes)} of weights, {gb(memory.free_bytes)} for KV; "
        f"{memory.tokens:,} tokens of KV per replica (engine's reserve: +-2 GB)"
    )
    yield f"  batch 1: TTFT {ms(single.ttft_s)}, {ms(single.step_s)} per token"
    yield (
        f"  batch {loaded.batch}: {ms(loaded.tpot_s)} per token; each replica serves "
        f"{loaded.requests_s:.2f} requests/s, {loaded.tokens_s:,.0f} tokens/s"
    )
    prices = plan.prices
    yield (
        f"  per 1M tokens: prompt {usd(prices.prompt)}, cached prompt {usd(prices.cached)}, "
        f"answer {usd(prices.answer)}"
    )
    for finding in plan.findings:
        yield f"  {'error' if finding.is_error else 'warning'}: {finding.text}"
    for shortfall in plan.shortfalls:
        yield f"  MISSED: {shortfall}"
    limit_s = plan.work.tpot_s
    if plan.shortfalls and limit_s is not None and loaded.tpot_s > limit_s:
        late_s = loaded.tpot_s - limit_s
        yield f"    at batch {loaded.batch} of this plan, TPOT is missed by {ms(late_s)}"
    yield f"  {NOT_CONSIDERED}"


def comparison_lines(plans: Sequence[FleetPlan]) -> Iterator[str]:
    """Yield a table of the sizing plans for several kinds of GPU, line by line."""
    heads = ("gpu", "layout", "replicas", "gpus", "$/hour", "TTFT", "per token", "missed")
    rows = [
        (
            *(plan.hardware.gpu.name, plan.layout.label, str(plan.replicas), str(plan.gpus)),
            *(usd(plan.usd_hour), ms(plan.single.ttft_s), ms(plan.loaded.tpot_s)),
            str(len(plan.shortfalls)),
        )
        for plan in plans
    ]
    yield from table(heads, rows)


def front_lines(points: Sequence[FleetPoint], headline: str) -> Iterator[str]:
    """Yield a table of the best layouts, and why others are impossible, line by line."""
    yield headline
    heads = ("weights", "gpu", "TP", "PP", "replicas", "batch", "TTFT", "per token", "req/s")
    rows = [
        (
            *(point.model, point.gpu, str(point.tp), str(point.pp), str(point.replicas)),
            *(str(point.batch), ms(point.ttft_s), ms(point.tpot_s), f"{point.requests_s:.1f}"),
            *(f"{point.tokens_s_gpu:.0f}", usd(point.usd_million), f"{point.kv_use:.0%}"),
        )
        for point in sorted(points, key=lambda point: (point.gpu, point.tpot_s))
        if point.is_best
    ]
    yield from table((*heads, "tok/s/GPU", "$/1M", "KV"), rows)
    yield ""
    yield from _reasons(points)


def _reasons(points: Sequence[FleetPoint]) -> Iterator[str]:
    seen: dict[tuple[str, str, int, int], FleetPoint] = {}
    for point in points:
        if point.reason:
            seen.setdefault((point.model, point.gpu, point.tp, point.pp), point)
    for point in list(seen.values())[:MAX_REASONS]:
        yield (
            f"not possible: {point.model} on {point.gpu}, TP {point.tp} x PP {point.pp}, batch "
            f"{point.batch} and more: {point.reason}"
        )
    if len(seen) > MAX_REASONS:
        yield f"... and {len(seen) - MAX_REASONS} more (--json lists all)"


def ladder_lines(steps: Sequence[LadderStep], batch: int) -> Iterator[str]:
    """Yield the decode speed by TP size as a table, line by line."""
    yield f"TP ladder at batch {batch}: ideal is weights over peak bandwidth"
    heads = ("TP", "ideal", "expected", "gain", "weights", "KV", "FLOPs", "collectives", "bound")
    rows = [
        (
            *(str(step.tp), ms(step.ideal_s), ms(step.expected_s)),
            f"x{steps[index - 1].expected_s / step.expected_s:.2f}" if index else "",
            *(ms(part) for part in (step.parts.weights_s, step.parts.kv_s, step.parts.flops_s)),
            *(ms(step.parts.collectives_s), step.parts.bound, f"{step.tokens_s_gpu:.0f}"),
            *(usd(step.usd_million), "-" if step.tax is None else f"{step.tax:+.0%}"),
            step.problem,
        )
        for index, step in enumerate(steps)
    ]
    yield from table((*heads, "tok/s/GPU", "$/1M", "TP tax", "problem"), rows)
    yield (
        f"FLOPs per byte of the model's square matrices: {steps[0].intensity:.4g} at TP 1, "
        f"{steps[-1].intensity:.4g} at TP {steps[-1].tp}; the GPU is balanced at "
        f"{steps[0].balance:.0f}"
    )
    yield (
        "TP tax: tokens/s per GPU against the least TP that holds the batch. Seed 002 says a few "
        "to 15 % at TP 8; this is what the step times give."
    )


def finalist_lines(results: Sequence[Finalist]) -> Iterator[str]:
    """Yield the replayed fleets as a table, line by line, best attainment first."""
    yield "replayed on the log, with the emitted configuration:"
    heads = (
        "fleet",
        "GPUs",
        "$/hour",
        "attainment",
        "refused",
        "TTFT p95",
        "TPOT p95",
        "prefix hits",
    )
    rows = [
        (
            *(result.fleet, str(result.gpus), usd(result.usd_hour)),
            *(f"{result.attainment:.1%}", f"{result.refused:.1%}"),
            *("-" if each is None else ms(each) for each in (result.ttft_p95_s, result.tpot_p95_s)),
            f"{result.hit_ratio:.0%}",
        )
        for result in results
    ]
    yield from table(heads, rows)


def against_lines(plan: FleetPlan, other: FleetPlan) -> Iterator[str]:
    """Yield a table that compares the costs of two models under the same traffic, line by line."""
    heads = ("model", "layout", "gpus", "$/hour", "per token", "prompt $/1M", "answer $/1M")
    rows = [
        (
            *(each.model.name, each.layout.label, str(each.gpus), usd(each.usd_hour)),
            *(ms(each.loaded.tpot_s), usd(each.prices.prompt), usd(each.prices.answer)),
            str(len(each.shortfalls)),
        )
        for each in (plan, other)
    ]
    yield from table((*heads, "missed"), rows)
    share = other.usd_hour / plan.usd_hour
    yield (
        f"{other.model.name} costs {share:.0%} of {plan.model.name}; whether it answers as well "
        "is a question for your own prompts"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns.

    The first and last column are left-aligned.
    """
    widths = [max(len(row[index]) for row in (heads, *rows)) for index in range(len(heads))]
    for row in (heads, *rows):
        cells = [
            cell.ljust(width) if index in (0, len(heads) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def as_plain(
    plans: Iterable[FleetPlan],
    points: Sequence[FleetPoint],
    steps: Sequence[LadderStep],
    results: Sequence[Finalist] = (),
    other: FleetPlan | None = None,
) -> dict[str, Any]:
    """Return a sizing plan and all comparisons as a JSON object, in seconds, bytes and dollars.

    plans    the plan for each kind of GPU
    points   all layouts that were compared
    steps    decode speeds by TP size
    results  replayed fleets
    other    the plan of another model to compare with; None: none
    """
    plain: dict[str, Any] = {
        "schema": "penstock-size/1",
        "plans": [_plan_members(plan) for plan in plans],
    }
    if points:
        plain["front"] = msgspec.to_builtins(points)
    if steps:
        plain["ladder"] = [
            msgspec.to_builtins(step)
            | {
                "parts": step.parts._asdict(),
                "bound": step.parts.bound,
                "ideal_tokens_s_gpu": 1 / step.ideal_s / step.tp,
                "intensity": step.intensity,
            }
            for step in steps
        ]
    if results:
        plain["replayed"] = msgspec.to_builtins(results)
    if other is not None:
        plain["against"] = _plan_members(other)
    return plain


def _plan_members(plan: FleetPlan) -> dict[str, Any]:
    members: dict[str, Any] = msgspec.to_builtins(plan)
    members["memory"]["text"] = plan.memory.text
    members["memory"]["is_enough"] = plan.memory.is_enough
    members["findings"] = [
        msgspec.to_builtins(finding) | {"text": finding.text} for finding in plan.findings
    ]
    return members | {
        "gpus": plan.gpus,
        "usd_hour": plan.usd_hour,
        "usd_per_million": msgspec.to_builtins(plan.prices),
    }
