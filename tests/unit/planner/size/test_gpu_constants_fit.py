"""Tests of fitting a GPU's constants to the measured step times of a mock fleet."""

from __future__ import annotations

import json
from math import cos, log2, tau
from pathlib import Path
from random import Random

import msgspec
import pytest

from mockgpu.timing.roofline import PROFILES, Roofline, StepTimes, StepWork
from planner.replay.fleet_sim import replay
from planner.replay.fleet_spec import FleetSpec, GroupKind
from planner.replay.replay_options import ReplayOptions
from planner.replay.traffic import traffic
from planner.size.cli import size
from planner.size.gpu_constants_fit import calibrate, least_squares
from planner.size.plan_draft import SizingError
from planner.size.recorded_step_times import (
    DecodePhase,
    MeasuredAnswer,
    PrefillPhase,
    phases_of,
    read_answers,
)
from planner.size.replica_times import ReplicaTimes
from planner.traces.recorded_request import TraceRequest
from policies import policy_registry
from policies.sizing.gpus import Fit, Gpu, gpu_named
from policies.sizing.model_shapes import model_named
from policies.sizing.parallel_layout import Layout
from tests.command_runner import CommandRunner, program

SIZE = program(size, read_config=json.loads)

NAME, TP = "llama-3.1-70b-fp8", 4
MODEL, H100 = model_named(NAME), msgspec.structs.replace(gpu_named("h100"), grid_name="")


class OtherTimes:
    """Simulated step times that the fitted equation cannot match exactly.

    They have other constants, random noise, and an effect that the equation lacks.
    """

    def __init__(self, seed: int, jitter: float) -> None:
        random = Random(seed)
        values = [getattr(H100.fit, name) for name in Fit.__struct_fields__]
        fit = Fit(*(value * random.uniform(0.6, 1.6) for value in values))
        gpu = msgspec.structs.replace(H100, fit=fit)
        self._line = Roofline(MODEL, gpu, TP, PROFILES["2026"])
        self._random, self._jitter = random, jitter

    def step_s(self, work: StepWork) -> float:
        sampling_s = 100e-6 * log2(1 + work.decode_seqs)
        return (self._line.equation_s(work) + sampling_s) * self._random.gauss(1, self._jitter)


class OtherKind(GroupKind, frozen=True):
    seed: int = 0

    def roofline(self) -> StepTimes:
        return OtherTimes(self.seed, 0.05)


def hour_of(seed: int, seconds: float = 3600.0) -> list[MeasuredAnswer]:
    random = Random(1000 + seed)
    requests, now = [], 0.0
    while (now := now + random.expovariate(2 - 1.5 * cos(tau * now / 1800))) < seconds:
        prompt, output = int(random.uniform(200, 3500)), int(random.uniform(40, 500))
        requests.append(TraceRequest(now, prompt, output))
    kind = OtherKind(NAME, "h100", TP, 1, kv_tokens=600_000, seed=seed)
    fleet = FleetSpec("calibrated", (kind,))
    run = replay(
        fleet,
        traffic(requests),
        policy_registry.build("least_loaded", {}),
        None,
        ReplayOptions(merges_steps=False),
    )
    return [
        MeasuredAnswer(
            *(record.group, record.entered_s, record.first_s, record.done_s),
            *(record.prompt_tokens, max(0, record.cached_tokens), record.output_tokens),
        )
        for record in run.records
        if record.done_s and record.first_s and record.entered_s is not None
    ]


def worst_errors(gpu: Gpu, seed: int) -> tuple[float, float]:
    times, true = ReplicaTimes(MODEL, gpu, Layout(TP), ()), OtherTimes(seed, 0.0)
    ttfts = [
        times.prefill_s(n) / true.step_s(StepWork(n, n * n / 2)) - 1 for n in (4500, 6000, 8000)
    ]
    tpots = [
        times.decode_s(b, c) / true.step_s(StepWork(0, 0.0, b, b * c)) - 1
        for b, c in ((40, 4000), (48, 2500), (28, 5000))
    ]
    return max(map(abs, ttfts)), max(map(abs, tpots))


def test_a_calibrated_plan_is_close_at_batches_and_contexts_that_the_log_lacks() -> None:
    found = calibrate(MODEL, H100, TP, phases_of(hour_of(20, 900), MODEL))
    before, after = worst_errors(H100, 20), worst_errors(found.gpu, 20)
    assert after[0] <= 0.05 < before[0]
    assert after[1] <= 0.05 < before[1]
    assert found.gpu.errors[1] < found.prior_errors[1]


def test_least_squares_finds_the_minimum_within_its_bounds() -> None:
    found = least_squares(lambda x: [x[0] - 0.5, x[1] - 3.0], [0.0, 0.0], bound=1.0)
    assert found == pytest.approx([0.5, 1.0], abs=1e-3)


def test_too_few_answers_are_refused_with_the_number_that_is_needed() -> None:
    answer = MeasuredAnswer("a", 0.0, 0.2, 2.2, 1000, 0, 100)
    with pytest.raises(SizingError, match="at least 50 prefills while no answer was generated"):
        calibrate(MODEL, H100, TP, phases_of([answer], MODEL))


def test_a_log_without_usable_answers_is_refused() -> None:
    with pytest.raises(SizingError, match="the log has 0 and 0"):
        calibrate(MODEL, H100, TP, phases_of([], MODEL))


def log_line(at_s: float, **members: object) -> str:
    plain = {
        "time": at_s,
        "status": 200,
        "endpoint": "a",
        "model": "m",
        "sent_us": 1_000,
        "first_token_us": 201_000,
        "last_us": 2_201_000,
        "prompt_tokens": 1_000,
        "completion_tokens": 101,
        "cached_tokens": 400,
    }
    return json.dumps(plain | members)


def test_complete_answers_of_the_log_are_measured(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    lines = [log_line(100), log_line(200, prefill="b"), log_line(300, status=500)]
    lines += [log_line(400, first_token_us=None), log_line(500, completion_tokens=1)]
    log.write_text("\n".join(lines))
    answers = read_answers(log, 1e6)
    assert [answer.output for answer in answers] == [101, 1]
    prefills = phases_of(answers, MODEL)[:2]
    assert [phase.seconds for phase in prefills] == pytest.approx([0.2, 0.2])
    assert prefills[0].chunks == ((600, 600 * 700),)
    decode = phases_of(answers, MODEL)[-1]
    assert (decode.seconds, decode.seqs) == pytest.approx((2.0, 1.0))


def prefills_of(*answers: MeasuredAnswer) -> list[PrefillPhase]:
    return [phase for phase in phases_of(answers, MODEL) if isinstance(phase, PrefillPhase)]


def test_a_prompt_that_alone_waits_for_another_is_measured_from_the_end_of_its_prefill() -> None:
    first = MeasuredAnswer("a", 0.0, 1.0, 9.0, 3000, 0, 100)
    next_ = MeasuredAnswer("a", 0.5, 1.3, 9.0, 2000, 500, 100)
    (phase,) = prefills_of(first, next_)
    assert (phase.was_queued, phase.seqs, phase.context) == (True, 1, 3002)
    assert phase.seconds == pytest.approx(0.3)
    assert phase.chunks == ((1500, 1500 * 1250),)
    # It may be in the first step in part, may have come too late, or is not alone.
    part = msgspec.structs.replace(first, prompt=7000)
    late = msgspec.structs.replace(next_, sent_s=0.98)
    twin = msgspec.structs.replace(next_, output=99)
    for answers in ((part, next_), (first, late), (first, next_, twin)):
        assert prefills_of(*answers) == []


def test_prompts_with_first_tokens_at_the_same_time_are_in_one_step() -> None:
    own = MeasuredAnswer("a", 0.0, 1.0, 9.0, 1000, 0, 100)
    others = [
        MeasuredAnswer("a", 2.0, first_s, 9.0, prompt, 0, 100)
        for first_s, prompt in ((3.0, 1000), (3.001, 2000), (4.0, 5000), (4.001, 5000))
    ]
    decode = next(p for p in phases_of([own, *others], MODEL) if isinstance(p, DecodePhase))
    assert decode.chunks == ((3000, 5e5 + 2e6), (5000, 1.25e7), (5000, 1.25e7))


def test_answers_at_the_same_time_measure_the_same_steps() -> None:
    for count, overlap in ((1, 1.0), (10, 9.0)):
        answers = [MeasuredAnswer("a", 0.0, 1.0, 10.0, 1000, 0, 100)] * count
        decodes = [p for p in phases_of(answers, MODEL) if isinstance(p, DecodePhase)]
        assert [phase.overlap for phase in decodes] == pytest.approx([overlap] * count)


def test_a_log_of_two_models_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    log.write_text("\n".join([log_line(1), log_line(2, model="n")]))
    with pytest.raises(SizingError, match="model, but this log has m, n"):
        read_answers(log, 1e6)


def test_the_command_refuses_what_it_cannot_calibrate(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    log.write_text(log_line(1))
    for options, text in (
        ([], "requires --measured-tp and exactly one GPU"),
        (["--measured-tp", "4", "--from", str(log)], "--calibrate cannot be combined with --from"),
        (["--measured-tp", "7"], "--measured-tp 7 is impossible"),
        (["--measured-tp", "4", "--last", "x"], "--last: 'x'"),
        (["--measured-tp", "4"], "at least 50 prefills while no answer was generated"),
    ):
        result = CommandRunner().invoke(SIZE, [NAME, "--calibrate", str(log), *options])
        assert (result.exit_code, text in result.output) == (2, True), result.output


def test_the_command_plans_with_the_fitted_constants(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    lines = []
    for place in range(120):
        ttft_us, prompt = 90_000 + 50 * place * 8, 500 + place * 8
        last_us = ttft_us + 20_000 * 100
        lines.append(
            log_line(
                *(10.0 * place,),
                prompt_tokens=prompt,
                cached_tokens=0,
                first_token_us=ttft_us,
                last_us=last_us,
            )
        )
    log.write_text("\n".join(lines))
    command = [NAME, "--in", "1000", "--out", "100", "--calibrate", str(log), "--measured-tp", "4"]
    result = CommandRunner().invoke(SIZE, command)
    assert "constants fitted to 120 prefills and 120 answers" in result.output
    assert "measured grid" not in result.output
