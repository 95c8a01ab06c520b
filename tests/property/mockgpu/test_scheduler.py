"""The scheduler under any load and any aborts: every job ends with its tokens, blocks come back, limits hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mockgpu.blocks import BlockPool
from mockgpu.job import Job, State
from mockgpu.scheduler import Scheduler

SIZE = 16
jobs = st.tuples(st.integers(1, 150), st.integers(1, 60), st.integers(0, 3))


def job_of(prompt: int, output: int, family: int) -> Job:
    """Jobs of a family share the beginning of their prompts, as far as both reach."""
    full = (prompt + output) // SIZE
    return Job(prompt, output, [family * 1000 + i for i in range(full)] if family else ())


class Watch:
    """Runs a scheduler and holds it to what must be true after every step."""

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
        assert plan.decode_context == sum(j.prompt_tokens + scheduler.made(j) for j in scheduler.decoding)
        for job in scheduler.decoding:
            assert len(job.blocks) == -(-(job.prompt_tokens + scheduler.made(job)) // SIZE)
        decoding = list(scheduler.decoding)
        outcome = scheduler.finish(plan)
        for job in decoding + outcome.began:
            self.tokens[job] = self.tokens.get(job, 0) + 1
        for job in outcome.ended:
            assert self.tokens[job] == job.output_tokens
        self.scheduler.pool.check()
        return True


@given(st.lists(jobs, min_size=1, max_size=25), st.integers(14, 60), st.integers(1, 12), st.integers(8, 200))
@settings(max_examples=150, deadline=None)
def test_every_job_makes_exactly_its_tokens_and_gives_all_blocks_back(
    loads: list[tuple[int, int, int]], blocks: int, seqs: int, budget: int
) -> None:
    watch = Watch(blocks, seqs, budget)
    added = [job_of(*load) for load in loads]
    for job in added:
        watch.scheduler.add(job)
    steps = 0
    while watch.step():
        steps += 1
        assert steps < 20_000, "the scheduler does not come to an end"
    assert all(job.state is State.DONE and watch.tokens[job] == job.output_tokens for job in added)
    assert watch.scheduler.pool.free == blocks
    assert watch.scheduler.totals.output_tokens == sum(job.output_tokens for job in added)
    assert watch.scheduler.totals.prompt_tokens == sum(job.prompt_tokens for job in added)
    assert not watch.scheduler._ends
    assert not any(watch.scheduler._grows)


@given(st.lists(jobs, min_size=1, max_size=20), st.lists(st.integers(0, 19), max_size=20))
@settings(max_examples=100, deadline=None)
def test_jobs_may_be_aborted_at_any_moment(loads: list[tuple[int, int, int]], victims: list[int]) -> None:
    watch = Watch(20, 6, 64)
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
    assert all(job.state is State.DONE for job in added)
    assert scheduler.pool.free == scheduler.pool.total
    assert not scheduler._ends
    assert not any(scheduler._grows)
