"""Tests of which requests a mock engine computes in each step, and which tokens are cached."""

from __future__ import annotations

import pytest

from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job, JobState, Scheduler, StepOutcome, StepPlan
from mockgpu.timing.roofline import StepWork


def scheduler(blocks: int = 100, seqs: int = 8, budget: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks), seqs, budget)


def run_one(engine: Scheduler) -> tuple[StepPlan, StepOutcome]:
    plan = engine.step()
    assert plan is not None
    return plan, engine.finish(plan)


def drain(engine: Scheduler) -> None:
    while (plan := engine.step()) is not None:
        engine.finish(plan)


def test_an_idle_scheduler_plans_nothing() -> None:
    assert scheduler().step() is None


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = scheduler()
    engine.add(Job(150, 1))
    observations = []
    while (plan := engine.step()) is not None:
        observations += [(chunk.start, chunk.tokens, chunk.is_last) for chunk in plan.chunks]
        engine.finish(plan)
    assert observations == [(0, 64, False), (64, 64, False), (128, 22, True)]


def test_the_step_that_ends_a_prompt_brings_its_first_token() -> None:
    engine, job = scheduler(), Job(40, 3)
    engine.add(job)
    _, outcome = run_one(engine)
    assert (outcome.first_token_jobs, outcome.decoded, engine.count_output(job)) == ([job], 0, 1)
    _, outcome = run_one(engine)
    assert (outcome.decoded, engine.count_output(job), outcome.ended) == (1, 2, [])
    _, outcome = run_one(engine)
    assert outcome.ended == [job]
    assert engine.count_output(job) == 3


def test_decodes_go_before_prompts_and_share_the_budget() -> None:
    engine, first = scheduler(), Job(60, 50)
    engine.add(first)
    run_one(engine)
    engine.add(Job(100, 1))
    plan, _ = run_one(engine)
    assert plan.work == StepWork(63, 63 * 63 / 2, 1, 61)


def test_a_second_chunk_attends_to_the_first() -> None:
    engine = scheduler()
    engine.add(Job(100, 1))
    run_one(engine)
    plan, _ = run_one(engine)
    assert plan.work.attention_area == 36 * (64 + 36 / 2)


def test_a_shared_prefix_is_computed_once_but_the_last_token_always() -> None:
    engine, keys = scheduler(), [1, 2, 3, 4]
    first, second = Job(64, 1, keys), Job(64, 1, keys)
    engine.add(first)
    drain(engine)
    engine.add(second)
    plan, _ = run_one(engine)
    assert (first.cached, second.cached) == (0, 48)
    assert [(chunk.start, chunk.tokens) for chunk in plan.chunks] == [(48, 16)]
    assert (engine.totals.prefix_queries, engine.totals.prefix_hits) == (128, 48)


def test_a_generated_answer_is_cached_for_the_next_turn() -> None:
    engine, keys = scheduler(), list(range(10))
    engine.add(Job(32, 33, keys[:4]))
    drain(engine)
    turn = Job(100, 1, keys[:6])
    engine.add(turn)
    drain(engine)
    assert turn.cached == 64


def test_no_more_than_max_num_seqs_run() -> None:
    engine = scheduler(seqs=2)
    for _ in range(5):
        engine.add(Job(4, 10))
    run_one(engine)
    assert (engine.running, len(engine.waiting)) == (2, 3)


def test_the_head_of_the_queue_is_not_overtaken_when_kv_is_short() -> None:
    engine = scheduler(blocks=6)
    engine.add(Job(64, 20))
    run_one(engine)
    engine.add(Job(60, 4))
    engine.add(Job(8, 4))
    run_one(engine)
    assert [job.prompt_tokens for job in engine.waiting] == [60, 8]


def test_when_kv_runs_out_the_newest_is_preempted_and_recomputed() -> None:
    engine = scheduler(blocks=6)
    old, new = Job(30, 50), Job(30, 50)
    engine.add(old)
    engine.add(new)
    while engine.totals.preemptions == 0:
        run_one(engine)
    assert (old.state, new.state, new.blocks) == (JobState.DECODE, JobState.WAITING, [])
    result = engine.count_output(new)
    assert result > 1
    drain(engine)
    assert (engine.count_output(old), engine.count_output(new), engine.pool.free) == (50, 50, 6)


def test_a_job_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into the group's KV cache"):
        scheduler(blocks=4).add(Job(60, 5))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_aborted_job_frees_its_blocks_in_every_state(steps: int) -> None:
    engine, job = scheduler(), Job(100, 50)
    engine.add(job)
    for _ in range(steps):
        run_one(engine)
    engine.abort(job)
    assert engine.pool.usage == 0
    assert engine.step() is None


def test_an_abort_between_plan_and_finish_is_passed_over() -> None:
    engine, stays, goes = scheduler(), Job(10, 5), Job(10, 5)
    engine.add(stays)
    engine.add(goes)
    plan = engine.step()
    assert plan is not None
    engine.abort(goes)
    assert engine.finish(plan).first_token_jobs == [stays]


def test_a_prompt_waits_for_the_store_only_if_it_has_more_of_it() -> None:
    engine = scheduler()
    asked: list[tuple[int, int]] = []

    def has_stored(job: Job, hits: int) -> bool:
        asked.append((job.prompt_tokens, hits))
        return job.prompt_tokens > 40

    engine.has_stored = has_stored
    known, unknown = Job(48, 1, [1, 2, 3], restores=True), Job(40, 1, [4, 5], restores=True)
    engine.add(known)
    engine.add(unknown)
    plan = engine.step()
    assert plan is not None
    assert [chunk.job for chunk in plan.chunks] == [unknown]
    assert (known.state, engine.to_fetch()) == (JobState.FETCHING, [known])
    assert asked == [(48, 0), (40, 0)]
