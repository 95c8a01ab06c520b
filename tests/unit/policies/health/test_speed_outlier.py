"""Tests of detecting slow endpoints, and how soon, with simulated engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from policies.engine.step_time import shape_for
from policies.health.endpoint_speed import SpeedRecord, SpeedVerdict
from policies.health.speed_outlier import ReviewedEndpoint, SlowLimits, review
from policies.health.speed_samples import MOST_UNCOUNTED, Measure
from policies.sizing.gpus import GPUS

LIMITS = SlowLimits()
H100, L40S = shape_for("h100", 4), shape_for("l40s", 2)


@dataclass
class Engine:
    """A simulated endpoint, normal or slow, that computes one prompt after another.

    prefill  factor on the time of prompts
    decode   factor on the time of output tokens
    """

    prefill: float = 1.0
    decode: float = 1.0
    kind: str = "h100"
    record: SpeedRecord = field(default_factory=SpeedRecord)
    free_at: float = 0.0
    due: list[tuple[float, int]] = field(default_factory=list)

    def member(self) -> ReviewedEndpoint:
        shape = H100 if self.kind == "h100" else L40S
        tokens = self.record.step_tokens(1 << 20, shape.budget_tokens, 0)
        return ReviewedEndpoint(self.record, self.kind, shape, tokens if self.record.waiting else 0)


def prompts(rng: Random) -> int:
    return rng.choice((60, 400, 1500, 6000))


def second(
    engines: list[Engine],
    rng: Random,
    now: float,
    per_s: float = 4.0,
    size: Callable[[Random], int] = prompts,
) -> None:
    for engine in engines:
        for now_s in sorted(now + rng.random() for _ in range(round(per_s))):
            tokens = size(rng)
            begins = max(now_s, engine.free_at)
            engine.free_at = begins + engine.prefill * (0.02 + 2e-5 * tokens) * rng.uniform(
                0.8, 1.25
            )
            engine.due += [(now_s, -tokens), (engine.free_at, tokens)]
        for now_s, tokens in sorted(event for event in engine.due if event[0] < now + 1.0):
            if tokens > 0:
                engine.record.on_first_token(tokens, now_s)
            else:
                engine.record.on_sent(-tokens, now_s)
        engine.due = [event for event in engine.due if event[0] >= now + 1.0]
        engine.record.record_streams(
            8, round(8 / (0.012 * engine.decode) * rng.uniform(0.9, 1.1)), 1.0, now + 1.0
        )
    review([engine.member() for engine in engines], now + 1.0, LIMITS)


def seconds_until_slow(
    engines: list[Engine], at: int = 0, healthy_s: int = 0, most_s: int = 30
) -> int | None:
    rng, factors = Random(7), (engines[at].prefill, engines[at].decode)
    engines[at].prefill = engines[at].decode = 1.0
    for now in range(healthy_s):
        second(engines, rng, float(now))
        assert all(engine.record.verdict is SpeedVerdict.NORMAL for engine in engines)
    engines[at].prefill, engines[at].decode = factors
    for now in range(healthy_s, healthy_s + most_s):
        second(engines, rng, float(now))
        assert all(
            other.record.verdict is SpeedVerdict.NORMAL
            for other in engines
            if other is not engines[at]
        )
        if engines[at].record.verdict is SpeedVerdict.SLOW:
            return now + 1 - healthy_s
    return None


@pytest.mark.parametrize("healthy_s", [0, 60])
@pytest.mark.parametrize(
    ("prefill", "decode"), [(10.0, 10.0), (3.3, 3.3), (1.0, 3.3), (3.3, 1.0), (1.0, 10.0)]
)
def test_a_slow_endpoint_is_detected_within_ten_seconds(
    prefill: float, decode: float, healthy_s: int
) -> None:
    engines = [Engine(prefill, decode), Engine(), Engine(), Engine()]
    took_s = seconds_until_slow(engines, healthy_s=healthy_s)
    assert took_s is not None
    assert took_s <= 10
    slowness = engines[0].record.slowness
    assert slowness is not None
    assert slowness.ratio >= LIMITS.factor
    if decode == 1.0:
        assert slowness.measure is Measure.TTFT
    if prefill == 1.0:
        assert slowness.measure is Measure.TPOT


def test_the_slower_of_two_endpoints_is_detected() -> None:
    assert seconds_until_slow([Engine(), Engine(5.0, 5.0)], at=1) is not None


def test_two_of_four_slow_endpoints_are_both_detected() -> None:
    engines, rng = [Engine(10.0, 10.0), Engine(10.0, 10.0), Engine(), Engine()], Random(3)
    for now in range(12):
        second(engines, rng, float(now))
    assert [engine.record.slowness is not None for engine in engines] == [True, True, False, False]


@pytest.mark.parametrize(
    "kinds", [("h100", "h100", "l40s", "l40s"), ("h100", "h100", "h100", "l40s")]
)
def test_endpoints_with_different_declarations_are_no_outliers(kinds: tuple[str, ...]) -> None:
    # In the second case, the l40s has no peer of its kind, so being slower than the pool is no
    # fault.
    engines = [Engine(*((6.0, 6.0) if kind == "l40s" else (1.0, 1.0)), kind) for kind in kinds]
    rng = Random(11)
    for now in range(120):
        second(engines, rng, float(now))
        assert all(engine.record.verdict is SpeedVerdict.NORMAL for engine in engines), now


def test_an_endpoint_without_a_peer_of_its_kind_is_judged_by_what_is_usual() -> None:
    engines, rng = [Engine(), Engine(), Engine(), Engine(4.0, 4.0, "l40s")], Random(5)
    for now in range(60):
        second(engines, rng, float(now), per_s=2.0)
    assert engines[3].record.verdict is SpeedVerdict.NORMAL
    engines[3].prefill = engines[3].decode = 24.0
    verdicts = []
    for now in range(60, 75):
        second(engines, rng, float(now), per_s=2.0)
        verdicts.append(engines[3].record.verdict)
    assert SpeedVerdict.SLOW in verdicts


@pytest.mark.parametrize("seed", range(20))
def test_an_endpoint_that_always_takes_twice_as_long_is_no_outlier(seed: int) -> None:
    engines, rng = [Engine(2.0, 2.0), Engine(), Engine(), Engine()], Random(seed)
    for now in range(120):
        second(engines, rng, float(now), per_s=2.0)
        assert engines[0].record.verdict is not SpeedVerdict.SLOW, now


def test_long_prompts_at_one_endpoint_and_short_ones_at_the_others_are_no_slowness() -> None:
    engines, rng = [Engine(), Engine(), Engine(), Engine()], Random(2)
    for now in range(60):
        for number, engine in enumerate(engines):
            for _ in range(4):
                tokens = 12_000 if not number else 50
                now_s = max(engine.free_at, now + rng.random())
                engine.record.on_sent(tokens, now_s)
                engine.free_at = now_s + 0.02 + 2e-5 * tokens
                engine.record.on_first_token(tokens, engine.free_at)
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        assert all(engine.record.verdict is not SpeedVerdict.SLOW for engine in engines)


def test_a_queue_of_prompts_is_no_slowness() -> None:
    # One endpoint has ten prompts waiting and the others one; each prompt takes equally long.
    engines = [Engine(), Engine(), Engine()]
    for now in range(30):
        for number, engine in enumerate(engines):
            line = 20 if not number else 1
            for _ in range(line):
                engine.record.on_sent(1000, float(now))
            for place in range(line):
                engine.record.on_first_token(1000, now + 0.04 * (place + 1))
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        assert all(engine.record.verdict is SpeedVerdict.NORMAL for engine in engines)


def test_prompts_in_between_do_not_make_streams_slow() -> None:
    engines = [Engine(), Engine(), Engine()]
    for now in range(30):
        for number, engine in enumerate(engines):
            busy_s = 0.7 if not number else 0.0
            if busy_s:
                engine.record.on_sent(8000, float(now))
                engine.record.on_first_token(8000, now + busy_s)
            engine.record.record_streams(8, round(8 * (1.0 - busy_s) / 0.012), 1.0, now + 1.0)
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        assert all(engine.record.verdict is SpeedVerdict.NORMAL for engine in engines)


@pytest.mark.parametrize("cancelled_s", [0.5, 1.5, 2.5])
def test_prompts_cancelled_while_they_wait_do_not_make_streams_slow(cancelled_s: float) -> None:
    # Every four seconds one engine gets a prompt that is then cancelled. While the engine computes
    # it, the engine's streams pause.
    engines = [Engine(), Engine(), Engine()]
    for now in range(40):
        phase = now % 4
        if phase == 0:
            engines[0].record.on_sent(8000, now + 0.1)
        if phase == int(cancelled_s):
            engines[0].record.on_dropped(8000, now - phase + cancelled_s)
        for engine in engines:
            is_paused = engine is engines[0]
            paused_s = max(0.0, min(phase + 1, cancelled_s) - max(phase, 0.1)) * is_paused
            engine.record.record_streams(8, round(8 * (1.0 - paused_s) / 0.012), 1.0, now + 1.0)
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        assert all(engine.record.verdict is SpeedVerdict.NORMAL for engine in engines)


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_steps_that_go_on_after_their_prompt_has_left_are_no_slowness(is_overtaken: bool) -> None:
    # Every other second, a prompt at one engine is cancelled after 0.1 s. The engine's step still
    # takes 0.5 s, for which its streams and the next prompt have to wait.
    engines = [Engine(), Engine(), Engine()]
    for now in range(40):
        for engine in engines:
            record, is_busy = engine.record, engine is engines[0] and now % 2 == 0
            if is_busy:
                record.on_sent(8000, now + 0.1)
                if is_overtaken:
                    record.on_overtaken(8000, 8000, now + 0.2, late_s=0.0, step_s=0.5)
                else:
                    record.on_dropped(8000, now + 0.2, step_s=0.5)
            record.on_sent(1000, now + 0.3)
            record.on_first_token(1000, now + (0.64 if is_busy else 0.34))
            clear_s = 0.96 - 0.5 * is_busy
            record.record_streams(8, round(8 * clear_s / 0.012), 1.0, now + 1.0)
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        assert all(engine.record.verdict is SpeedVerdict.NORMAL for engine in engines), now


def test_streams_are_no_sample_while_a_step_of_unknown_begin_may_run() -> None:
    # The first prompt is cancelled, and the second one waits for its step to end. The second prompt
    # is cancelled 0.1 s after the start of its own step, which takes 0.6 s.
    record = SpeedRecord()
    record.record_streams(4, 200, 1.0, 0.0)
    record.on_sent(8000, 0.1)
    record.on_dropped(8000, 0.3, step_s=0.8)
    record.on_sent(6000, 0.7)
    record.on_dropped(6000, 1.0, step_s=0.6)
    record.on_sent(500, 1.5)
    record.on_dropped(500, 1.6, step_s=0.6)
    record.record_streams(4, 4, 1.0, 1.0)
    record.record_streams(4, 20, 1.0, 2.0)
    record.record_streams(4, 200, 1.0, 4.0)
    record.prepare(4.0)
    assert record.tracks[1].recent.total == 2
    assert sum(record.tracks[1].recent.seconds) < 0.05


def test_a_prompt_that_left_a_shared_step_counts_as_work_of_the_step() -> None:
    record = SpeedRecord()
    record.on_sent(4000, 0.0)
    record.on_sent(1000, 0.01)
    record.on_dropped(1000, 0.1)
    record.on_first_token(4000, 0.5)
    record.prepare(1.0)
    assert sum(record.tracks[0].recent.work) == 5000


def test_a_step_whose_work_is_unknown_is_no_sample() -> None:
    # The long prompt arrived so soon that it may have been part of the first prompt's step.
    record = SpeedRecord()
    record.on_sent(500, 0.0)
    record.on_sent(8000, 0.02)
    record.on_first_token(500, 0.4)
    record.on_first_token(8000, 0.45)
    record.on_sent(2000, 1.0)
    record.on_first_token(2000, 1.1)
    record.prepare(2.0)
    assert record.tracks[0].recent.total == 1
    assert sum(record.tracks[0].recent.work) == 2000


def test_prompts_of_different_sizes_in_one_bin_are_compared_by_their_size() -> None:
    engines = [Engine(), Engine(), Engine()]
    for now in range(20):
        for engine in engines:
            tokens = 8100 if engine is engines[0] else 4100
            engine.record.on_sent(tokens, float(now))
            engine.record.on_first_token(
                tokens,
                now
                + 1.3e-4 * tokens * (engine is engines[0])
                + 1e-4 * tokens * (engine is not engines[0]),
            )
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        assert all(engine.record.verdict is SpeedVerdict.NORMAL for engine in engines)


def test_a_latency_that_every_prompt_has_does_not_hide_slow_prompts() -> None:
    engines = [Engine(), Engine(), Engine(), Engine()]
    for now in range(20):
        for engine in engines:
            for place, tokens in enumerate((200, 1000, 3000)):
                slowness = 3.0 if engine is engines[0] else 1.0
                sent_at = now + 0.3 * place
                engine.record.on_sent(tokens, sent_at)
                engine.record.on_first_token(tokens, sent_at + 0.015 + slowness * 2.5e-5 * tokens)
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
    assert engines[0].record.verdict is SpeedVerdict.SLOW
    assert engines[0].record.slowness is not None
    # Over all samples, the times differ by a factor of 2.4 only.
    assert engines[0].record.slowness.ratio >= LIMITS.factor


def test_short_prompts_of_an_engine_that_is_slow_at_prompts_alone_are_evidence() -> None:
    # Of a short prompt's time, 43 % are latency. With the latency included, a short prompt takes
    # 2.14 times as long at the slow engine.
    engines = [Engine(), Engine(), Engine(), Engine()]
    for now in range(20):
        for number, engine in enumerate(engines):
            tokens = 4000 if now % 4 == 0 else 720
            took_s = 0.016 + (1.0 if number else 3.0) * 3e-5 * tokens
            for place in range(2):
                engine.record.on_sent(tokens, now + 0.5 * place)
                engine.record.on_first_token(tokens, now + 0.5 * place + took_s)
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        if engines[0].record.verdict is SpeedVerdict.SLOW:
            break
    assert engines[0].record.verdict is SpeedVerdict.SLOW
    assert now <= 5


def sparse_second(engines: list[Engine], rng: Random, now: int, sigma: float, gap_s: int) -> None:
    # Simulate one second. The first engine gets a prompt every `gap_s` seconds, the others four per
    # second.
    for engine in engines:
        for place in range(4 if engine is not engines[0] else not now % gap_s):
            tokens, sent_at = prompts(rng), now + 0.25 * place
            took_s = engine.prefill * (0.02 + 2e-5 * tokens) * rng.lognormvariate(0.0, sigma)
            engine.record.on_sent(tokens, sent_at)
            most_s = 0.249 if engine is not engines[0] else 0.999
            engine.record.on_first_token(tokens, sent_at + min(most_s, took_s))
    review([engine.member() for engine in engines], now + 1.0, LIMITS)


def test_an_endpoint_with_few_prompts_is_slow_as_soon_as_it_has_enough_samples() -> None:
    # Five samples are enough for a verdict, but reviews count from the first slow prompt on.
    engines, rng = [Engine(3.2), Engine(), Engine(), Engine()], Random(1)
    verdicts = []
    for now in range(20):
        sparse_second(engines, rng, now, 0.0, gap_s=4)
        verdicts.append(engines[0].record.verdict)
    assert verdicts[:16] == [SpeedVerdict.NORMAL] * 16
    assert verdicts[16] is SpeedVerdict.SLOW


@pytest.mark.parametrize("seed", range(10))
def test_an_endpoint_with_few_prompts_of_very_different_times_is_not_slow(seed: int) -> None:
    engines, rng = [Engine(), Engine(), Engine(), Engine()], Random(seed)
    for now in range(600):
        sparse_second(engines, rng, now, 0.5, gap_s=4)
        assert all(engine.record.verdict is not SpeedVerdict.SLOW for engine in engines), now


def test_samples_that_are_not_slow_end_a_suspicion_step_by_step() -> None:
    engines = [Engine(), Engine(), Engine()]

    def seconds(number: int, now: int) -> float:
        return 0.2 if number else (0.9 if now < 3 else 0.4)

    verdicts = []
    for now in range(12):
        for number, engine in enumerate(engines):
            for place in range(2):
                sent_at = now + 0.5 * place
                engine.record.on_sent(4000, sent_at)
                engine.record.on_first_token(4000, sent_at + 0.5 * seconds(number, now))
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        verdicts.append(engines[0].record.verdict)
    assert SpeedVerdict.SUSPECT in verdicts
    assert SpeedVerdict.SLOW not in verdicts
    assert verdicts[-1] is SpeedVerdict.NORMAL


@pytest.mark.parametrize("stall_s", [0.5, 2.0])
def test_one_prompt_that_takes_long_is_no_slowness(stall_s: float) -> None:
    engines, rng = [Engine(), Engine(), Engine(), Engine()], Random(13)
    for now in range(40):
        if now == 20:
            engines[0].free_at = now + stall_s
        second(engines, rng, float(now))
        assert engines[0].record.verdict is not SpeedVerdict.SLOW


def test_an_endpoint_that_has_become_fast_again_is_normal() -> None:
    engines, rng = [Engine(4.0, 4.0), Engine(), Engine()], Random(1)
    began = 0
    while engines[0].record.verdict is SpeedVerdict.NORMAL:
        second(engines, rng, float(began))
        began += 1
    engines[0].prefill = engines[0].decode = 1.0
    engines[0].record.accept()
    for now_s, tokens in engines[0].due:  # requests sent before the return end first
        engines[0].record.on_dropped(abs(tokens), now_s)
    engines[0].due, engines[0].free_at = [], 0.0
    for now in range(began, began + 20):
        second(engines, rng, float(now))
        assert engines[0].record.verdict is SpeedVerdict.NORMAL
    assert engines[0].record.slowness is None


def test_a_first_token_that_never_comes_is_evidence_too() -> None:
    engines = [Engine(), Engine(), Engine()]
    for now in range(20):
        for number, engine in enumerate(engines):
            if not number and now >= 8:
                if now == 8:
                    engine.record.on_sent(4000, float(now))
                continue
            engine.record.on_sent(4000, float(now))
            engine.record.on_first_token(4000, now + 0.1)
        review(
            [ReviewedEndpoint(engine.record, engine.kind, H100, 4000) for engine in engines],
            now + 1.0,
            LIMITS,
        )
        if engines[0].record.verdict is SpeedVerdict.SLOW:
            break
    assert engines[0].record.verdict is SpeedVerdict.SLOW
    assert now <= 8 + 10


def test_answers_that_come_whole_are_compared_by_their_length() -> None:
    engines, rng = [Engine() for _ in range(4)], Random(4)
    for now in range(20):
        for number, engine in enumerate(engines):
            for _ in range(3):
                tokens = rng.choice((20, 100, 400))
                engine.record.record_answer(tokens, tokens * (0.1 if not number else 0.01))
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        if engines[0].record.verdict is SpeedVerdict.SLOW:
            break
    assert now < 10
    assert engines[0].record.slowness is not None
    assert engines[0].record.slowness.measure is Measure.ANSWER


def test_whole_answers_of_a_busier_endpoint_may_take_longer() -> None:
    engines = [Engine() for _ in range(4)]
    for now in range(20):
        for number, engine in enumerate(engines):
            for _ in range(12 if not number else 3):
                engine.record.record_answer(100, 4.0 if not number else 1.0)
        review([engine.member() for engine in engines], now + 1.0, LIMITS)
        assert engines[0].record.verdict is SpeedVerdict.NORMAL


def test_a_factor_of_zero_marks_no_endpoint_slow() -> None:
    engines, rng = [Engine(10.0, 10.0), Engine(), Engine()], Random(1)
    for now in range(20):
        second(engines, rng, float(now))
    for engine in engines:
        engine.record.restart()
    for now in range(20):
        for engine in engines:
            engine.record.record_answer(100, 1.0 if engine is not engines[0] else 50.0)
        review([engine.member() for engine in engines], now + 1.0, SlowLimits(factor=0.0))
    assert engines[0].record.verdict is SpeedVerdict.NORMAL


def test_answers_of_a_busy_endpoint_are_sampled_and_all_of_its_tokens_are_counted() -> None:
    engines = [Engine(), Engine(), Engine(), Engine()]
    for now in range(1, 5):
        for engine in engines:
            for _ in range(10 * MOST_UNCOUNTED):
                engine.record.record_answer(100, 5.0 if engine is engines[0] else 1.0)
        review([engine.member() for engine in engines], float(now), LIMITS)
        for engine in engines:
            assert engine.record.tracks[2].reference.total <= now * MOST_UNCOUNTED
            assert engine.record.output > 100 * 5 * MOST_UNCOUNTED
    assert [engine.record.verdict for engine in engines] == [
        SpeedVerdict.SLOW,
        *[SpeedVerdict.NORMAL] * 3,
    ]


def test_probes_of_an_ejected_endpoint_grow_rarer() -> None:
    record = SpeedRecord()
    probes = [now_s / 4 for now_s in range(400) if record.try_start_probe(now_s / 4)]
    assert probes[:4] == [0.0, 1.0, 3.0, 7.0]
    assert probes[-1] - probes[-2] == 30.0


def test_every_gpu_of_the_planner_has_a_prior_of_its_own() -> None:
    shapes = {name: shape_for(name, 4, params_b=70) for name in GPUS}
    # GB200 and MI300X borrow efficiencies, but read memory at their own rate.
    assert len({shape.weights_s for shape in shapes.values()}) == len(GPUS)
    assert shapes["gb200"].weights_s < shapes["b200"].weights_s < shapes["h200"].weights_s
    assert shape_for("unknown", 4, params_b=70) == shapes["h100"]
