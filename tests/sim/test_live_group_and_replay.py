"""Tests that the mock engine produces every token at the time that the simulator computes.

The mock engine runs on an event loop whose clock jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from mockgpu.scheduler import Job
from mockgpu.tp_group import GroupSpec, TpGroup
from planner.replay import FleetSpec, GroupKind, ReplayOptions, ReplayRecord, replay, traffic
from planner.replay.block_chain import keys_of
from planner.traces import TraceRequest
from policies import policy_registry
from tests.sim.conversation import conversation
from tests.sim.jumping_loop import JumpingLoop, Stamps

KIND = GroupKind("llama-3.1-70b-fp8", "h200", 4, kv_tokens=120_000)


async def run_live(
    requests: list[TraceRequest], kind: GroupKind = KIND, turns: list[int] | None = None
) -> list[tuple[Job, Stamps]]:
    # Run all requests on one live mock engine; return the jobs with their recorded times.
    #
    # `turns` are the ranks that get them, in order.
    loop = asyncio.get_running_loop()
    spec = GroupSpec(
        *("m", kind.shape, kind.hardware, kind.tp),
        kv_tokens=kind.kv_tokens,
        ep=kind.ep,
        ranks=kind.ranks,
        ep_skew=kind.ep_skew,
    )
    lockstep: list[TpGroup] | None = [] if spec.is_lockstep else None
    ranks = [TpGroup(spec, loop, rank, lockstep) for rank in range(spec.ranks)]
    order = itertools.cycle(range(spec.ranks) if turns is None else turns)
    stamped: list[tuple[Job, Stamps]] = []

    def arrive(request: TraceRequest) -> None:
        job, stamps = (
            Job(request.input_tokens, request.output_tokens, keys_of(request, 16)),
            Stamps(loop),
        )
        stamped.append((job, stamps))
        ranks[next(order)].submit(job, stamps, "length")

    for request in requests:
        loop.call_at(request.arrival_s, arrive, request)
    while len(stamped) < len(requests) or any(group.in_flight for group in ranks):
        await asyncio.sleep(1.0)  # of virtual time
    return stamped


def replayed(
    requests: list[TraceRequest], merges_steps: bool, kind: GroupKind = KIND
) -> list[ReplayRecord]:
    spec = FleetSpec("twin", (kind,), block_tokens=16)
    policy = policy_registry.build("round_robin", {})
    return replay(
        spec, traffic(requests), policy, options=ReplayOptions(merges_steps=merges_steps)
    ).records


@pytest.mark.parametrize(("merges_steps", "within"), [(False, 1e-6), (True, 1e-3)])
def test_a_replayed_group_emits_every_token_when_the_live_one_does(
    merges_steps: bool, within: float
) -> None:
    # Sixty requests of the trace exceed the KV cache, so that some wait and some are preempted.
    requests = [request for request in conversation(120) if request.input_tokens < 40_000][:60]
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        live = runner.run(run_live(requests))
    twins = replayed(requests, merges_steps)
    assert (
        sum(job.preemptions for job, _ in live) == sum(request.preemptions for request in twins) > 0
    )
    compare(live, twins, within)


LOCKSTEP = GroupKind("deepseek-v3", "h200", 1, kv_tokens=120_000, ep=8, ranks=8, ep_skew=1.2)


@pytest.mark.parametrize(("merges_steps", "within"), [(False, 1e-6), (True, 3e-3)])
def test_replayed_ranks_in_lockstep_emit_every_token_when_the_live_ones_do(
    merges_steps: bool, within: float
) -> None:
    requests = [request for request in conversation(400) if request.input_tokens < 40_000][:240]
    twins = replayed(requests, merges_steps, LOCKSTEP)
    turns = [int(twin.group.rpartition("/dp")[2]) for twin in twins]
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        live = runner.run(run_live(requests, LOCKSTEP, turns))
    assert set(turns) == set(range(8))
    assert sum(job.preemptions for job, _ in live) > 0
    compare(live, twins, within)


def compare(live: list[tuple[Job, Stamps]], twins: list[ReplayRecord], within: float) -> None:
    for (job, stamps), twin in zip(live, twins, strict=True):
        assert twin.first_s is not None
        assert twin.done_s is not None
        assert len(stamps.tokens_s) == twin.output_tokens
        assert twin.cached_tokens == job.cached
        assert stamps.tokens_s[0] == pytest.approx(twin.first_s, rel=within)
        assert stamps.ended_s == pytest.approx(twin.done_s, rel=within)
        gaps = [
            after - before
            for before, after in zip(stamps.tokens_s, stamps.tokens_s[1:], strict=False)
        ]
        assert max(gaps, default=0.0) == pytest.approx(
            twin.longest_gap_s, rel=10 * within, abs=1e-9
        )
