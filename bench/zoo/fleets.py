"""Builds the engines of a random workload, its latency budgets, and its request rate."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.zoo.space import SPANS, Workload
from mockgpu.timing.roofline import StepWork
from planner.replay.fleet_spec import FleetSpec, GroupKind, validate
from planner.traces.recorded_request import TraceRequest
from policies.pricing.split_decision import SplitRule
from policies.routing_types import Role, Slo

KINDS: dict[str, tuple[tuple[str, int], ...]] = {
    # The first GPU is the usual one; the others appear in unequal fleets.
    "llama-3.1-70b-fp8": (("h100", 4), ("h200", 4), ("a100", 4)),
    "qwen3-32b": (("h100", 2), ("a100", 4), ("h200", 2)),
    "llama-3.1-8b": (("a100", 1), ("l40s", 1), ("h100", 1)),
}
USUAL_KV = {"llama-3.1-70b-fp8": 600_000, "qwen3-32b": 307_000, "llama-3.1-8b": None}
IDLE_TTFT, IDLE_TPOT = 2.5, 1.8
"""Minimum latency budgets, as multiples of the latency at the slowest idle engine."""

LONGEST_PREFILL_S = 10.0
"""Maximum seconds that the slowest idle engine may need to compute or transfer the longest prompt.

It limits the length of prompts.
"""

SHORTEST_LIMIT = 4_000
LONG_SEQS = 128
"""Maximum number of concurrent sequences per engine if answers are long."""

ALWAYS_SPLIT = SplitRule(1)
BATCH = 48
"""Number of sequences per step that is assumed when the request rate is estimated."""


def build_fleet(workload: Workload) -> FleetSpec:
    gpu, tp = KINDS[workload.model][0]
    usual = GroupKind(
        workload.model,
        gpu,
        tp,
        count=workload.groups,
        kv_tokens=USUAL_KV[workload.model],
        max_num_seqs=LONG_SEQS if workload.is_long else 256,
        max_num_batched_tokens=workload.chunk_tokens,
        link_gb_s=workload.link_gb_s,
    )
    kinds = _with_condition(usual, workload)
    if workload.split == "pools":
        kinds = _in_pools(kinds, workload)
    return validate(
        FleetSpec(
            workload.name,
            tuple(kinds),
            split=ALWAYS_SPLIT if workload.split == "pools" else SplitRule(),
            pairs=workload.split == "pairs",
        )
    )


def _with_condition(usual: GroupKind, workload: Workload) -> list[GroupKind]:
    # Return the engine kinds of a fleet under the workload's condition.
    #
    # Some engines may be of another kind, have a wrong label, or be slow.
    draw, count = workload.condition_draw, workload.groups
    change = msgspec.structs.replace
    if workload.condition == "unequal":
        others = KINDS[workload.model][1:]
        gpu, tp = others[int(draw * 997) % len(others)]
        share = max(1, min(count - 1, round(count * (0.25 + 0.5 * draw))))
        other = change(usual, gpu=gpu, tp=tp, kv_tokens=None, count=share)
        return [change(usual, count=count - share), other]
    if workload.condition == "labels":
        if draw < 0.4:
            chunk = 2048 if workload.chunk_tokens > 2048 else 16384
            return [change(usual, labelled_batched_tokens=chunk)]
        wrong = "l40s" if draw < 0.7 else "b200"
        share = count if draw % 0.1 < 0.05 else max(1, count // 2)
        kinds = [change(usual, labelled_gpu=wrong, count=share)]
        return [*kinds, change(usual, count=count - share)] if share < count else kinds
    if workload.condition == "slow":
        share = max(1, round(count * 0.2 * draw))
        slow = change(usual, slowness=1.5 + 2.5 * draw, count=share)
        return [change(usual, count=count - share), slow]
    return [usual]


def _in_pools(kinds: Sequence[GroupKind], workload: Workload) -> list[GroupKind]:
    groups = [msgspec.structs.replace(kind, count=1) for kind in kinds for _ in range(kind.count)]
    count = len(groups)
    prefills = max(1, min(count - 1, round(count * workload.prefill_share)))
    return [
        msgspec.structs.replace(
            kind,
            role=Role.PREFILL
            if (index + 1) * prefills // count > index * prefills // count
            else Role.DECODE,
        )
        for index, kind in enumerate(groups)
    ]


def most_prompt_tokens(workload: Workload, spec: FleetSpec) -> int:
    """Return the length of the longest prompt that a workload may have, in tokens.

    The prompt may fill a quarter of the smallest KV cache, and take LONGEST_PREFILL_S to compute.
    """
    most = min(kind.capacity_tokens for kind in spec.kinds) // 4
    for kind in spec.kinds:
        most = min(most, kind.capacity_tokens // 4)
        if workload.split == "pools":
            moved = LONGEST_PREFILL_S * kind.link_gb_s * 1e9 / kind.shape.kv_token_bytes
            most = min(most, max(SHORTEST_LIMIT, int(moved)))
        while most > SHORTEST_LIMIT and prefill_s(kind, most) > LONGEST_PREFILL_S:
            most = int(most * 0.9)
    return most


def prefill_s(kind: GroupKind, tokens: int) -> float:
    """Return how many seconds an idle engine of this kind needs to compute a prompt."""
    roofline, chunk, total = kind.roofline(), kind.max_num_batched_tokens, 0.0
    for start in range(0, tokens, chunk):
        part = min(chunk, tokens - start)
        total += roofline.step_s(StepWork(part, part * (start + part / 2), 0, 0))
    return kind.slowness * total


def budgets(
    workload: Workload, spec: FleetSpec, requests: Sequence[TraceRequest], rate_s: float
) -> Slo:
    """Return the latency budgets of a random workload, changed so that its engines can meet them.

    First the budget of the first token is lowered until the arrivals last at least SPANS times as
    long. Then both budgets are raised until the slowest idle engine can meet them.

    workload  the workload, with its random budgets
    spec      the engines
    requests  the requests
    rate_s    requests per second
    """
    drawn_s = min(workload.ttft_s, len(requests) / (SPANS * rate_s))
    lengths = sorted(request.input_tokens + request.output_tokens for request in requests)
    context = lengths[int(0.95 * len(lengths))]
    tpot_s = max(
        kind.slowness * kind.roofline().step_s(StepWork(0, 0.0, 8, 8 * context))
        for kind in spec.kinds
    )
    return Slo(
        "standard",
        max(drawn_s, IDLE_TTFT * idle_ttft_s(workload, spec, requests)),
        max(workload.tpot_s, IDLE_TPOT * tpot_s),
    )


def idle_ttft_s(workload: Workload, spec: FleetSpec, requests: Sequence[TraceRequest]) -> float:
    """Return the seconds to the first token of the longest prompt, on the slowest idle engine.

    This includes the transfer of KV if prefill and decode engines are separate.
    """
    longest = max(request.input_tokens for request in requests)
    slowest_s = 0.0
    for kind in spec.kinds:
        moved_s = 0.0
        if workload.split == "pools":
            moved_s = longest * kind.shape.kv_token_bytes / (kind.link_gb_s * 1e9)
        slowest_s = max(slowest_s, prefill_s(kind, longest) + moved_s)
    return slowest_s


def estimate_rate(spec: FleetSpec, requests: Sequence[TraceRequest], uncached: float) -> float:
    """Return a rough estimate of the requests per second that the engines can serve.

    uncached  share of the prompt tokens that must be computed, from 0 to 1
    """
    count = len(requests)
    prompt = uncached * sum(request.input_tokens for request in requests) / count
    context = sum(request.input_tokens + request.output_tokens / 2 for request in requests) / count
    answer = sum(request.output_tokens for request in requests) / count
    total = 0.0
    for kind in spec.kinds:
        roofline = kind.roofline()
        batch = max(1, min(BATCH, int(kind.capacity_tokens / context)))
        chunk = kind.max_num_batched_tokens
        token_s = roofline.step_s(StepWork(chunk, chunk * context / 2, 0, 0)) / chunk
        decode_s = roofline.step_s(StepWork(0, 0.0, batch, int(batch * context))) / batch
        total += kind.count / (kind.slowness * (prompt * token_s + answer * decode_s))
    if any(kind.role is Role.DECODE for kind in spec.kinds):
        moved = sum(request.input_tokens for request in requests) / count
        links = [kind.link_gb_s * 1e9 / kind.shape.kv_token_bytes for kind in spec.groups]
        total = min(total / 2, sum(links) / 2 / moved)
    return total
