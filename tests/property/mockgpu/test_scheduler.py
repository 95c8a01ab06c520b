"""Property tests of a mock engine's scheduler: jobs get all tokens, and blocks are freed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job, JobState, Scheduler
from mockgpu.split_legs import AgentPeer, DecodeLeg, PrefillLeg

SIZE = 16
jobs = st.tuples(st.integers(1, 150), st.integers(1, 60), st.integers(0, 3))


def job_of(prompt: int, output: int, family: int) -> Job:
    # Return a job; jobs of a family share the beginning of their prompts.
    full = (prompt + output) // SIZE
    return Job(prompt, output, [family * 1000 + i for i in range(full)] if family else ())


class CheckedScheduler:
    def __init__(self, blocks: int, seqs: int, budget: int) -> None:
        self.scheduler = Scheduler(BlockPool(blocks), seqs, max(budget, seqs))
        self.tokens: dict[Job, int] = {}

    def step(self) -> bool:
        scheduler = self.scheduler
        plan = scheduler.step()
        if plan is None:
            assert not scheduler.running
            return False
        assert plan.decode_seqs + plan.work.prefill_tokens <= scheduler.max_num_batched_tokens
        assert scheduler.running <= scheduler.max_num_seqs
        assert plan.decode_context == sum(
            j.prompt_tokens + scheduler.count_output(j) for j in scheduler.decoding
        )
        for job in scheduler.decoding:
            assert len(job.blocks) == -(-(job.prompt_tokens + scheduler.count_output(job)) // SIZE)
        decoding = list(scheduler.decoding)
        outcome = scheduler.finish(plan)
        for job in decoding + outcome.first_token_jobs:
            self.tokens[job] = self.tokens.get(job, 0) + 1
        for job in outcome.ended:
            assert self.tokens[job] == job.output_tokens
        self.scheduler.pool.check()
        return True


@given(
    st.lists(jobs, min_size=1, max_size=25),
    st.integers(14, 60),
    st.integers(1, 12),
    st.integers(8, 200),
)
@settings(max_examples=150, deadline=None)
def test_every_job_makes_exactly_its_tokens_and_gives_all_blocks_back(
    loads: list[tuple[int, int, int]], blocks: int, seqs: int, budget: int
) -> None:
    watch = CheckedScheduler(blocks, seqs, budget)
    added = [job_of(*load) for load in loads]
    for job in added:
        watch.scheduler.add(job)
    steps = 0
    while watch.step():
        steps += 1
        assert steps < 20_000, "the scheduler does not come to an end"
    assert all(
        job.state is JobState.DONE and watch.tokens[job] == job.output_tokens for job in added
    )
    assert watch.scheduler.pool.free == blocks
    assert watch.scheduler.totals.output_tokens == sum(job.output_tokens for job in added)
    assert watch.scheduler.totals.prompt_tokens == sum(job.prompt_tokens for job in added)
    assert not watch.scheduler._ends
    assert not any(watch.scheduler._grows)


@given(st.lists(jobs, min_size=1, max_size=20), st.lists(st.integers(0, 19), max_size=20))
@settings(max_examples=100, deadline=None)
def test_jobs_may_be_aborted_at_any_moment(
    loads: list[tuple[int, int, int]], victims: list[int]
) -> None:
    watch = CheckedScheduler(20, 6, 64)
    scheduler = watch.scheduler
    added = [job_of(*load) for load in loads]
    for job in added:
        scheduler.add(job)
    for victim in victims:
        plan = scheduler.step()
        if plan is None:
            break
        scheduler.abort(added[victim % len(added)])
        scheduler.finish(plan)
        scheduler.pool.check()
        scheduler.abort(added[(victim * 7) % len(added)])
        scheduler.pool.check()
    while (plan := scheduler.step()) is not None:
        scheduler.finish(plan)
    assert all(job.state is JobState.DONE for job in added)
    assert scheduler.pool.free == scheduler.pool.total
    assert not scheduler._ends
    assert not any(scheduler._grows)


kinds = st.sampled_from(["whole", "give", "take", "parked"])


class SplitScheduler:
    def __init__(self, blocks: int) -> None:
        self.scheduler = Scheduler(BlockPool(blocks), 6, 64)
        self.fetching: list[Job] = []

    def job(self, prompt: int, output: int, family: int, kind: str) -> Job:
        job = job_of(prompt, 1 if kind == "give" else output, family)
        if kind == "give":
            job.leg, job.keeps_blocks = PrefillLeg("name", 1.0), True
        elif kind != "whole":
            job.leg = DecodeLeg("name", AgentPeer("peer"), 1.0, is_parked=kind == "parked")
        return job

    def step(self) -> bool:
        plan = self.scheduler.step()
        self.fetching += [
            job for job in self.scheduler.to_fetch() if job.state is JobState.FETCHING
        ]
        if plan is not None:
            self.scheduler.finish(plan)
        self.check()
        return plan is not None

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.pool.check()
        for job in scheduler.fetching:
            assert len(job.blocks) * SIZE >= job.prompt_tokens
        for job in scheduler.kept:
            assert job.state is JobState.DONE
        holdings = {
            block
            for job in [*scheduler.fetching, *scheduler.fetched, *scheduler.prefilling]
            for block in job.blocks
        }
        holdings |= {block for job in scheduler.decoding for block in job.blocks}
        holdings |= {block for blocks in scheduler.kept.values() for block in blocks}
        assert len(holdings) == scheduler.pool.total - scheduler.pool.free

    def act(self, job: Job, how: int) -> None:
        if (
            job.state is JobState.FETCHING
            and how % 3 == 0
            and not (isinstance(job.leg, DecodeLeg) and job.leg.is_parked)
        ):
            self.scheduler.on_landed(job, job.prompt_tokens - 1)
        elif job.state is JobState.FETCHING and how % 3 == 1:
            self.scheduler.recompute(job)
        elif how % 3 == 2:
            self.scheduler.abort(job)
        else:
            self.scheduler.release_kept(job)
        self.check()


@given(
    st.lists(st.tuples(jobs, kinds), min_size=1, max_size=16),
    st.integers(14, 40),
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 8)), max_size=40),
)
@settings(max_examples=70, deadline=None)
def test_jobs_whose_kv_comes_and_goes_leak_no_block_whatever_happens_when(
    loads: list[tuple[tuple[int, int, int], str]], blocks: int, events: list[tuple[int, int]]
) -> None:
    halves = SplitScheduler(blocks)
    added = [halves.job(*load, kind) for load, kind in loads]
    for job in added:
        halves.scheduler.add(job)
    for which, how in events:
        halves.step()
        halves.act(added[which % len(added)], how)
    for _ in range(3_000):
        if not halves.step() and all(job.state is JobState.DONE for job in added):
            break
        for job in added:
            if job.state is JobState.FETCHING:
                halves.act(job, 2 if isinstance(job.leg, DecodeLeg) and job.leg.is_parked else 0)
            halves.scheduler.release_kept(job)
    assert all(job.state is JobState.DONE for job in added)
    for job in added:
        halves.scheduler.release_kept(job)
    assert halves.scheduler.pool.free == blocks
    assert not halves.scheduler.kept
    assert not halves.scheduler._ends
    assert not any(halves.scheduler._grows)
