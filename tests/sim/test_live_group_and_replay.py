"""Tests that the live mock engine and the simulated one produce every token of equal jobs at the
same time.

The live one runs on an event loop whose clock jumps to the next timer, so that nothing waits.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mockgpu.group import GroupSpec, TpGroup
from mockgpu.job import Job
from mockgpu.request_parser import ApiError
from planner.replay import FleetSpec, GroupKind, ReplayOptions, ReplayRecord, replay, traffic
from planner.replay.block_chain import keys_of
from planner.traces import TraceRequest
from policies import registry
from tests.sim.conversation import conversation

KIND = GroupKind("llama-3.1-70b-fp8", "h200", 4, kv_tokens=120_000)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        look = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            self._now += timeout or 0.0
            return look(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


class Stamps:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.tokens_s: list[float] = []
        self.ended_s = 0.0

    def on_token(self) -> None:
        self.tokens_s.append(self._loop.time())

    def on_end(self) -> None:
        self.ended_s = self._loop.time()

    def on_failure(self, error: ApiError) -> None:
        raise error


async def run_live(requests: list[TraceRequest]) -> list[tuple[Job, Stamps]]:
    # Run all requests on one live mock engine; return the jobs with their recorded times.
    loop = asyncio.get_running_loop()
    spec = GroupSpec("m", KIND.shape, KIND.hardware, KIND.tp, kv_tokens=KIND.kv_tokens)
    group = TpGroup(spec, loop)
    stamped: list[tuple[Job, Stamps]] = []

    def arrive(request: TraceRequest) -> None:
        job, stamps = (
            Job(request.input_tokens, request.output_tokens, keys_of(request, 16)),
            Stamps(loop),
        )
        stamped.append((job, stamps))
        group.submit(job, stamps, "length")

    for request in requests:
        loop.call_at(request.arrival_s, arrive, request)
    while len(stamped) < len(requests) or group.in_flight:
        await asyncio.sleep(1.0)  # of virtual time
    return stamped


def replayed(requests: list[TraceRequest], leaping: bool) -> list[ReplayRecord]:
    spec = FleetSpec("twin", (KIND,), block_tokens=16)
    policy = registry.build("round_robin", {})
    return replay(spec, traffic(requests), policy, options=ReplayOptions(leaping=leaping)).records


@pytest.mark.parametrize(("leaping", "within"), [(False, 1e-6), (True, 1e-3)])
def test_a_replayed_group_emits_every_token_when_the_live_one_does(
    leaping: bool, within: float
) -> None:
    # Sixty requests of the trace exceed the KV cache, so that some wait and some are preempted.
    requests = [request for request in conversation(120) if request.input_tokens < 40_000][:60]
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        live = runner.run(run_live(requests))
    twins = replayed(requests, leaping)
    assert (
        sum(job.preemptions for job, _ in live) == sum(request.preemptions for request in twins) > 0
    )
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
