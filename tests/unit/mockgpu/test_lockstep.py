"""Tests of data-parallel ranks of a mock engine that begin and end each step together."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.main import run as penstock
from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.rank_balancer import RankBalancer
from mockgpu.request_parser import ApiError
from mockgpu.scheduler import Job
from mockgpu.timing.layout_times import SharedExperts, shared_experts_for, step_times_for
from mockgpu.timing.roofline import StepWork
from mockgpu.tp_group import GroupSpec, TpGroup
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from policies.sizing.parallel_layout import Layout
from tests.command_runner import CommandRunner
from tests.sim.jumping_loop import JumpingLoop, Stamps

DEEPSEEK, H200 = model_named("deepseek-v3"), gpu_named("h200")
LAYOUT = Layout(1, ep=8, dp=8)
SPEC = GroupSpec("m", DEEPSEEK, H200, 1, ep=8, ranks=8, kv_tokens=100_000)
IDLE = StepWork()

works = st.builds(
    lambda tokens, start, seqs, context: StepWork(
        tokens, tokens * (start + tokens / 2), seqs, seqs * context
    ),
    *(st.integers(0, 8192), st.integers(0, 60_000), st.integers(0, 64), st.integers(1, 60_000)),
)


def joint(skew: float = 1.0) -> SharedExperts:
    return shared_experts_for(DEEPSEEK, H200, LAYOUT, skew=skew)


@given(works.filter(lambda work: work.prefill_tokens or work.decode_seqs), st.floats(1.0, 3.0))
def test_equal_ranks_take_as_long_as_one_batch_divided_over_them(
    work: StepWork, skew: float
) -> None:
    whole = step_times_for(DEEPSEEK, H200, LAYOUT, skew=skew, budget_tokens=8192)
    alone = step_times_for(DEEPSEEK, H200, Layout(1, ep=8), skew=skew)
    assert joint(skew).step_s([work] * 8) == pytest.approx(alone.step_s(work), rel=1e-9)
    if not work.prefill_tokens:
        eightfold = StepWork(0, 0.0, 8 * work.decode_seqs, 8 * work.decode_context)
        assert joint(skew).step_s([work] * 8) == pytest.approx(whole.step_s(eightfold), rel=1e-9)


@given(st.lists(works, min_size=8, max_size=8), st.integers(0, 7), works)
def test_more_work_on_one_rank_never_shortens_the_step(
    each: list[StepWork], rank: int, more: StepWork
) -> None:
    times = joint()
    added = list(each)
    added[rank] = StepWork(*(a + b for a, b in zip(each[rank], more, strict=True)))
    assert times.step_s(added) >= times.step_s(each) * (1 - 1e-9)
    assert times.step_s(list(reversed(each))) == pytest.approx(times.step_s(each))


def test_one_loaded_rank_holds_up_the_others_more_than_the_same_work_divided() -> None:
    prompt = StepWork(8192, 8192 * 4096.0)
    part = StepWork(1024, 1024 * 4096.0)
    alone = joint().step_s([prompt, *[IDLE] * 7])
    assert alone > 3 * joint().step_s([part] * 8)
    # Prompts on the other ranks at the same time cost the experts' time alone.
    assert joint().step_s([prompt] * 8) < 4 * alone


def test_skewed_experts_delay_the_experts_of_all_ranks() -> None:
    work = [StepWork(0, 0.0, 32, 32 * 4096)] * 8
    even, skewed, twice = (joint(skew).step_s(work) for skew in (1.0, 1.5, 2.0))
    assert twice - even == pytest.approx(2 * (skewed - even), rel=1e-6)
    assert even < skewed


def test_a_dummy_batch_reads_the_dense_weights_and_few_experts() -> None:
    one = joint().step_s([StepWork(0, 0.0, 1, 100), *[IDLE] * 7])
    each = joint().step_s([StepWork(0, 0.0, 1, 100)] * 8)
    dense_s = (DEEPSEEK.params - DEEPSEEK.expert_params) / (H200.hbm_bytes_s * H200.fit.weights_eff)
    assert dense_s < one < each


def test_each_rank_has_its_part_of_the_memory() -> None:
    whole = GroupSpec("m", DEEPSEEK, H200, 1, ep=8, dp=8)
    rank = GroupSpec("m", DEEPSEEK, H200, 1, ep=8, ranks=8)
    assert rank.layout == whole.layout
    assert rank.capacity_tokens == whole.capacity_tokens // 8


def ranks_of(spec: GroupSpec, loop: asyncio.AbstractEventLoop) -> list[TpGroup]:
    lockstep: list[TpGroup] | None = [] if spec.is_lockstep else None
    return [TpGroup(spec, loop, rank, lockstep) for rank in range(spec.ranks)]


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)


@pytest.mark.parametrize(("lockstep", "waits"), [(None, True), (False, False)])
def test_a_prompt_on_one_rank_delays_the_tokens_of_all_ranks_in_lockstep(
    lockstep: bool | None, waits: bool
) -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        spec = GroupSpec("m", DEEPSEEK, H200, 1, ep=8, ranks=8, lockstep=lockstep)
        ranks = ranks_of(spec, loop)
        stamps = Stamps(loop)
        ranks[0].submit(Job(100, 1000), stamps, "length")
        loop.call_later(1.0, ranks[5].submit, Job(8000, 1), Stamps(loop), "length")
        await asyncio.sleep(60.0)
        assert all(rank.in_flight == 0 for rank in ranks)
        times = stamps.tokens_s
        return [after - before for before, after in pairwise(times)]

    gaps = run(main())
    assert len(gaps) == 999
    assert (max(gaps) > 4 * sorted(gaps)[500]) is waits


def test_an_idle_rank_takes_a_request_at_the_end_of_the_joint_step() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        ranks = ranks_of(SPEC, loop)
        first, second = Stamps(loop), Stamps(loop)
        ranks[0].submit(Job(16_000, 1), first, "length")  # this prompt takes two steps
        loop.call_later(0.05, ranks[1].submit, Job(16, 1), second, "length")
        await asyncio.sleep(60.0)
        return first.tokens_s[0], second.tokens_s[0]

    first_s, second_s = run(main())
    assert second_s == first_s  # the second job waits for the first step, and ends with the next


class Failures(Stamps):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.errors: list[ApiError] = []

    def on_failure(self, error: ApiError) -> None:
        self.errors.append(error)


def test_a_lost_gpu_ends_the_work_of_all_ranks_in_lockstep_until_they_restart() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ranks = ranks_of(SPEC, loop)
        sinks = [Failures(loop) for _ in ranks]
        for rank, sink in zip(ranks, sinks, strict=True):
            rank.submit(Job(100, 1000), sink, "length")
        await asyncio.sleep(2.0)
        ranks[3].fail_rank(0)
        assert all(rank.is_dead for rank in ranks)
        assert all(len(sink.errors) == 1 for sink in sinks)
        made = [len(sink.tokens_s) for sink in sinks]
        await asyncio.sleep(2.0)
        assert made == [len(sink.tokens_s) for sink in sinks]
        ranks[0].restore()
        again = Stamps(loop)
        ranks[6].submit(Job(100, 5), again, "length")
        await asyncio.sleep(2.0)
        assert len(again.tokens_s) == 5

    run(main())


def test_a_rank_that_hangs_holds_up_the_others_and_they_go_on_together() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ranks = ranks_of(SPEC, loop)
        sinks = [Stamps(loop) for _ in ranks]
        for rank, sink in zip(ranks, sinks, strict=True):
            rank.submit(Job(100, 200), sink, "length")
        await asyncio.sleep(1.0)
        ranks[0].fail_rank(0, hang=True)
        made = [len(sink.tokens_s) for sink in sinks]
        await asyncio.sleep(5.0)
        assert made == [len(sink.tokens_s) for sink in sinks]
        assert 0 < made[0] < 200
        ranks[0].restore()
        await asyncio.sleep(60.0)
        assert [len(sink.tokens_s) for sink in sinks] == [200] * 8

    run(main())


def test_a_rank_that_dies_of_one_request_takes_the_others_with_it() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ranks = ranks_of(SPEC, loop)
        sinks = [Failures(loop) for _ in ranks]
        jobs = [Job(100, 100) for _ in ranks]
        for rank, sink, job in zip(ranks, sinks, jobs, strict=True):
            rank.submit(job, sink, "length")
        ranks[4].mark_fault(jobs[4], InjectedFault(FaultKind.DIE_MID_DECODE, after=5))
        await asyncio.sleep(60.0)
        assert all(len(sink.errors) == 1 for sink in sinks)
        assert all(5 <= len(sink.tokens_s) <= 7 for sink in sinks)

    run(main())


def test_slowness_of_one_rank_slows_all() -> None:
    async def main(slowness: float) -> float:
        loop = asyncio.get_running_loop()
        ranks = ranks_of(SPEC, loop)
        ranks[0].slow_decode = slowness
        stamps = Stamps(loop)
        ranks[7].submit(Job(100, 100), stamps, "length")
        await asyncio.sleep(300.0)
        return stamps.ended_s - stamps.tokens_s[0]

    assert run(main(10.0)) == pytest.approx(10 * run(main(1.0)))


def test_the_engine_gives_a_request_to_the_rank_with_the_fewest_waiting_and_running() -> None:
    balancer = RankBalancer(3)
    counts = [(0, 5), (1, 0), (0, 4)]
    # Until the next statistics of the ranks, each request that was sent counts as four running
    # ones.
    assert [balancer.pick(0.0, lambda: counts) for _ in range(3)] == [1, 2, 0]
    counts[0] = (0, 0)
    assert balancer.pick(0.05, lambda: counts) in (1, 2), "statistics are 100 ms old"
    assert balancer.pick(0.11, lambda: counts) == 0


def test_an_idle_engine_gives_requests_to_its_ranks_in_turn() -> None:
    balancer = RankBalancer(4)
    picks = [balancer.pick(float(number), lambda: [(0, 0)] * 4) for number in range(8)]
    assert picks == [0, 1, 2, 3] * 2


SHARED = ("--model", "deepseek-v3", "--gpu", "h200", "--tp", "1", "--ep", "8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp-lockstep"], "have no effect without --dp-ranks above 1"),
        ([*SHARED, "--pp", "2", "--dp-ranks", "8"], "combined with --pp or --cp"),
        ([*SHARED, "--dp-ranks", "4"], "does not divide tp * dp = 4"),
    ],
)
def test_ranks_with_which_no_engine_starts_are_refused(options: list[str], message: str) -> None:
    result = CommandRunner().invoke(penstock, ["mock", "--port", "0", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
