"""Tests that many simulated decode steps at once take the same time as single steps."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job, JobState, Scheduler
from mockgpu.timing.decode_run import DecodeRun, most_steps
from mockgpu.timing.roofline import Roofline, StepWork
from mockgpu.timing.step_time_grids import roofline_for
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named


@cache
def roofline(model: str, gpu: str, tp: int) -> Roofline:
    return roofline_for(model_named(model), gpu_named(gpu), tp)


SHAPES = [("llama-3.1-70b-fp8", "h100", 4), ("llama-3.1-8b", "l40s", 1), ("qwen3-32b", "h100", 2)]


@given(
    shape=st.sampled_from(SHAPES),
    seqs=st.integers(1, 256),
    each=st.integers(1, 60_000),
    steps=st.integers(1, 4096),
    slowness=st.sampled_from([1.0, 2.5]),
)
@settings(max_examples=40, deadline=None)
def test_a_run_in_closed_form_takes_as_long_as_its_steps(
    shape: tuple[str, str, int], seqs: int, each: int, steps: int, slowness: float
) -> None:
    timed, context = roofline(*shape), seqs * each

    def step_s(step: int) -> float:
        return timed.step_s(StepWork(0, 0.0, seqs, context + step * seqs)) * slowness

    run = DecodeRun(step_s, most_steps(seqs, context, steps))
    real = 0.0
    for step in range(run.steps):
        seconds = step_s(step)
        real += seconds
        assert run.step_s(step) == pytest.approx(seconds, rel=5e-3)
        # The largest relative error of 20,000 runs is 1.8e-3.
        assert run.end_of(step + 1) == pytest.approx(real, rel=2.5e-3)


@given(steps=st.integers(1, 500), part=st.floats(0.0, 1.2))
@settings(max_examples=40, deadline=None)
def test_what_is_over_after_a_time_is_what_ended_by_then(steps: int, part: float) -> None:
    timed, context = roofline(*SHAPES[0]), 16 * 5000
    run = DecodeRun(
        lambda step: timed.step_s(StepWork(0, 0.0, 16, context + 16 * step)),
        most_steps(16, context, steps),
    )
    at_s = run.end_of(run.steps) * part
    over = run.completed_by(at_s)
    assert run.end_of(over) <= at_s or over == 0
    assert over == run.steps - 1 or run.end_of(over + 1) > at_s


job_shapes = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=12
)


def jobs_of(shapes: list[tuple[int, int, int]]) -> list[tuple[int, Job]]:
    return [
        (
            tick,
            Job(
                prompt,
                output,
                tuple(place % 3 * 100 + block for block in range((prompt + output) // 4)),
            ),
        )
        for place, (prompt, output, tick) in enumerate(shapes)
    ]


def events_of_run(
    shapes: list[tuple[int, int, int]], blocks: int, merges_steps: bool
) -> list[tuple[int, str, int, int, int]]:
    # Run jobs and return their events by tick: first tokens, ends, cached tokens, preemptions.
    #
    # `merges_steps`: run many decode steps at once.
    scheduler = Scheduler(BlockPool(blocks, 4), max_num_seqs=6, max_num_batched_tokens=24)
    pending = sorted(
        (
            (tick, place, job)
            for place, (tick, job) in enumerate(jobs_of(shapes))
            if scheduler.fits(job)
        ),
        key=lambda each: each[:2],
    )
    names = {job: place for _, place, job in pending}
    happened: list[tuple[int, str, int, int, int]] = []
    while True:
        while pending and pending[0][0] <= scheduler.tick:
            scheduler.add(pending.pop(0)[2])
        plan = scheduler.step()
        if plan is None:
            if not pending:
                return happened
            scheduler.tick = pending[0][0]
            continue
        if merges_steps and not plan.chunks:
            most = pending[0][0] - scheduler.tick - 1 if pending else 10_000
            quiet = scheduler.decode_only_steps(max(0, most))
            plan = scheduler.advance(quiet)
        outcome = scheduler.finish(plan)
        for kind, members in (("began", outcome.first_token_jobs), ("ended", outcome.ended)):
            happened += [
                (scheduler.tick, kind, names[job], job.cached, job.preemptions) for job in members
            ]
        scheduler.pool.check()


@given(shapes=job_shapes, blocks=st.integers(20, 60))
@settings(max_examples=150, deadline=None)
def test_advancing_gives_the_same_first_tokens_ends_hits_and_preemptions_as_stepping(
    shapes: list[tuple[int, int, int]], blocks: int
) -> None:
    assert events_of_run(shapes, blocks, merges_steps=True) == events_of_run(
        shapes, blocks, merges_steps=False
    )


def test_no_steps_are_skipped_while_a_prompt_is_computed_or_the_queue_may_move() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_num_batched_tokens=256)
    scheduler.add(Job(8, 50))
    plan = scheduler.step()
    assert plan is not None
    assert scheduler.decode_only_steps(99) == 0
    scheduler.finish(plan)
    plan = scheduler.step()
    assert plan is not None
    assert not plan.chunks
    assert scheduler.decode_only_steps(99) == 48  # one made, one planned, and one for the end
    scheduler.advance(48)
    (job,) = scheduler.decoding
    assert scheduler.count_output(job) == 49
    assert job.state is JobState.DECODE
