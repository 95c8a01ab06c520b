"""Tests of how many batch requests a pool may run beside its live requests."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.concurrency_and_preemption import (
    ConcurrencyLimiter,
    LatencyTargets,
    PoolReading,
    choose_preempted,
)

TARGETS = LatencyTargets(1.0, 0.05)
CALM = PoolReading(places=100, busy=0)
counts = st.integers(0, 200)


def grown(seconds: float, reading: PoolReading = CALM) -> tuple[ConcurrencyLimiter, int, float]:
    # Simulate a limiter for `seconds` in which all permitted batch requests run.
    #
    # Returns the limiter, the number of requests permitted at the end, and the time.
    limiter, running, now = ConcurrencyLimiter(0.9, 64), 0, 0.0
    while now < seconds:
        now += 0.02
        running = limiter.allow(
            msgspec.structs.replace(reading, busy=running), TARGETS, running, now
        )
    return limiter, running, now


def test_an_idle_pool_is_filled_to_the_limit_within_seconds() -> None:
    assert grown(0.1)[1] < 8
    assert grown(20.0)[1] == 64


def test_the_share_of_the_places_is_never_exceeded() -> None:
    assert grown(20.0, PoolReading(places=20, busy=0))[1] == 18


@given(counts, counts, counts, st.integers(0, 64), st.booleans())
def test_the_places_of_others_are_left_to_them(
    places: int, others: int, waiting: int, running: int, is_missed: bool
) -> None:
    reading = PoolReading(places, others + running, waiting, missed=int(is_missed))
    allowed = ConcurrencyLimiter(0.9, 64).allow(reading, TARGETS, running, 1.0)
    assert 0 <= allowed <= 64
    assert allowed == 0 or allowed + others <= 0.9 * places
    if waiting:
        assert allowed <= max(0, running - waiting)


@pytest.mark.parametrize(
    "sign",
    [
        {"price": 0.1},
        {"missed": 1},
        {"ttft_s": 0.8},
        {"tpot_s": 0.04},
    ],
)
def test_each_sign_of_pressure_halves_the_limit_and_stops_its_growth(
    sign: dict[str, float],
) -> None:
    limiter, running, now = grown(20.0)
    reading = PoolReading(places=100, busy=running, **sign)  # type: ignore[arg-type]
    assert limiter.allow(reading, TARGETS, running, now) <= 32
    assert limiter.allow(PoolReading(100, 32), TARGETS, 32, now + 0.9) == 32
    assert limiter.allow(PoolReading(100, 32), TARGETS, 32, now + 1.3) > 32


def test_a_waiting_request_takes_one_place_at_once_and_the_rest_goes_on() -> None:
    limiter, running, now = grown(20.0)
    assert limiter.allow(PoolReading(100, running, waiting=2), TARGETS, running, now) == 62
    assert limiter.allow(PoolReading(100, 64), TARGETS, 62, now + 0.05) == 62
    assert limiter.allow(PoolReading(100, 64), TARGETS, 62, now + 0.2) == 64


def test_latencies_within_the_targets_are_no_pressure() -> None:
    limiter, running, now = grown(20.0)
    reading = PoolReading(100, running, ttft_s=0.5, tpot_s=0.03)
    assert limiter.allow(reading, TARGETS, running, now) == running


@given(counts, counts, counts, st.integers(0, 64), st.integers(0, 80))
def test_reserved_places_are_permitted_whatever_the_load(
    places: int, others: int, waiting: int, running: int, reserved: int
) -> None:
    reading = PoolReading(places, others + running, waiting, price=1.0, missed=1)
    free = ConcurrencyLimiter(0.9, 64).allow(reading, TARGETS, running, 1.0)
    allowed = ConcurrencyLimiter(0.9, 64).allow(reading, TARGETS, running, 1.0, reserved)
    assert allowed == max(free, min(reserved, 64))


def test_requests_that_lose_least_are_preempted_first_and_newer_ones_before_older() -> None:
    costs = [(False, lost) for lost in (0, 50, 0, 9)]
    assert choose_preempted(costs, 3) == [2, 0, 3]
    assert choose_preempted([(False, 1)], 5) == [0]


def test_requests_of_hurried_batches_are_preempted_last() -> None:
    assert choose_preempted([(True, 0), (False, 500), (True, 9)], 3) == [1, 0, 2]
