"""Tests that a change in the kind of requests is detected soon, and one of their rate is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import cos, pi
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sizing.workload_drift import (
    BINS,
    LIMIT,
    MEASURES,
    DriftWatch,
    DriftWindow,
    RequestShape,
    ShapeCounts,
    ShapeMemory,
    psi,
    request_tokens,
)

HOUR_S, DAY_S = 3600.0, 86_400.0
Draw = Callable[[Random], RequestShape]


def conversation(rng: Random) -> RequestShape:
    turn = 1 + min(30, int(rng.expovariate(0.3)))
    prompt = int(rng.lognormvariate(6.5, 0.9)) + 300 * turn
    return RequestShape(prompt, int(rng.lognormvariate(5.3, 0.7)), min(1.0, 1.2 / turn), turn)


def agents(rng: Random) -> RequestShape:
    turn = 1 + int(rng.expovariate(0.05))
    prompt = 8000 + int(rng.lognormvariate(7.5, 0.5)) * min(turn, 20)
    return RequestShape(prompt, int(rng.lognormvariate(4.2, 0.6)), min(1.0, 1.0 / turn), turn)


def sized_for(draw: Draw, requests: int = 20_000) -> dict[str, list[float]]:
    counts, rng = ShapeCounts(), Random(99)
    for _ in range(requests):
        counts.add(draw(rng))
    return counts.shares()


CONVERSATION = sized_for(conversation)


def watched(
    watch: DriftWatch, until_s: float, draw: Callable[[float], Draw], rate: Callable[[float], float]
) -> Iterator[DriftWindow]:
    rng, now = Random(7), 0.0
    while now < until_s:
        now += rng.expovariate(rate(now))
        yield from watch.add(now, draw(now)(rng))


@pytest.mark.parametrize("phase_s", range(0, 600, 75))
def test_agents_instead_of_conversations_are_found_within_30_minutes_at_any_phase(
    phase_s: int,
) -> None:
    turns_at = 2 * HOUR_S + phase_s
    windows = watched(
        DriftWatch(CONVERSATION),
        4 * HOUR_S,
        lambda now: agents if now >= turns_at else conversation,
        lambda _: 1.0,
    )
    first = next(window for window in windows if window.is_alarm)
    assert turns_at < first.ends_s <= turns_at + 1800
    assert set(first.drifted) >= {"prompt", "uncached"}


def test_seven_days_of_the_same_shapes_at_diurnal_rates_raise_no_alarm() -> None:
    def rate(now: float) -> float:
        return 0.4 - 0.36 * cos(2 * pi * now / DAY_S)

    hourly = [rate((hour + 0.5) * HOUR_S) for hour in range(24)]
    watch = DriftWatch(CONVERSATION, hourly)
    windows = list(watched(watch, 7 * DAY_S, lambda _: conversation, rate))
    assert len(windows) > 500
    assert not [window for window in windows if window.is_alarm]
    ratios = [window.rate_ratio for window in windows if window.rate_ratio is not None]
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.1)


def test_another_rate_alone_is_shown_and_never_an_alarm() -> None:
    watch = DriftWatch(CONVERSATION, [0.5] * 24)
    windows = list(watched(watch, 3 * HOUR_S, lambda _: conversation, lambda _: 2.0))
    assert windows[5].rate_ratio == pytest.approx(4.0, rel=0.1)
    assert not [window for window in windows if window.is_alarm]


def test_one_odd_window_is_no_alarm() -> None:
    odd = (HOUR_S, HOUR_S + 600)
    windows = watched(
        DriftWatch(CONVERSATION),
        3 * HOUR_S,
        lambda now: agents if odd[0] <= now < odd[1] else conversation,
        lambda _: 1.0,
    )
    found = list(windows)
    assert [window for window in found if window.drifted]
    assert not [window for window in found if window.is_alarm]


def test_new_shares_and_turns_are_compared_only_once_enough_is_remembered() -> None:
    windows = list(watched(DriftWatch(CONVERSATION), 2 * HOUR_S, lambda _: agents, lambda _: 1.0))
    compared = [set(window.index) for window in windows]
    assert compared[:2] == [{"prompt", "output"}] * 2
    assert compared[2:6] == [{"prompt", "output", "uncached"}] * 4
    assert compared[6] == set(MEASURES)
    assert windows[1].alarms == ("prompt", "output")


def test_windows_end_at_full_ten_minutes_and_hours_are_those_of_the_day() -> None:
    began_s = 1_795_996_800.0 + 5 * HOUR_S - 250  # shortly before five o'clock
    watch = DriftWatch(CONVERSATION, [0.0] * 4 + [2.0] + [1.0] * 19, began_s)
    shape = RequestShape(100, 10, 1.0)
    windows = [window for n in range(900) for window in watch.add(began_s + n, shape)]
    assert [window.ends_s - began_s for window in windows] == [250, 850]
    assert [window.rate_ratio for window in windows] == pytest.approx([0.5, 1.0])


@given(st.lists(st.lists(st.integers(0, (1 << 64) - 1), max_size=8, unique=True), max_size=40))
def test_a_new_block_is_never_taken_for_one_that_was_seen(prompts: list[list[int]]) -> None:
    # If two blocks map to one place, the older block is forgotten, which is permitted. Only taking
    # a new block for a known one is an error.
    memory, seen = ShapeMemory(1 << 10), set[int]()
    for blocks in prompts:
        known = {(block ^ (1 << 64) - 1) or 1 for block in blocks}
        expected = len(known - seen) / len(blocks) if blocks else 1.0
        share = memory.shape(1, 1, blocks, 0).uncached_share
        assert expected - 1e-9 <= share <= 1.0
        seen |= known


def test_a_memory_with_room_knows_nearly_all_blocks_again() -> None:
    memory, rng = ShapeMemory(1 << 16), Random(6)
    blocks = [rng.getrandbits(48) for _ in range(500)]
    assert memory.shape(1, 1, blocks, 0).uncached_share == 1.0
    assert memory.shape(1, 1, blocks, 0).uncached_share <= 0.02


def test_a_full_memory_forgets_the_oldest_and_stays_as_small() -> None:
    memory, rng = ShapeMemory(1 << 10, 4), Random(3)
    for session in range(1, 5000):
        memory.shape(1, 1, [rng.getrandbits(48)], session)
    assert len(memory._blocks) == 1 << 10
    assert list(memory._turns) == [4996, 4997, 4998, 4999]
    assert memory.shape(1, 1, [], 4999).turn == 2
    assert memory.shape(1, 1, [], 1).turn == 1


def test_lengths_that_no_engine_reports_are_estimated() -> None:
    assert request_tokens(None, 4000, None, 12) == (1000, 10)
    assert request_tokens(7, 4000, 3, 12) == (7, 3)
    assert request_tokens(7, 4000, 0, 0) == (7, 1)


def test_few_requests_wait_for_more() -> None:
    watch = DriftWatch(CONVERSATION)
    windows = list(watched(watch, 6 * HOUR_S, lambda _: conversation, lambda _: 0.05))
    assert all(window.requests >= 100 for window in windows)
    assert 5 <= len(windows) <= 11


def test_the_index_of_a_known_shift_is_the_textbooks() -> None:
    # 0.5/0.5 against 0.3/0.7: (0.3-0.5) ln(0.6) + (0.7-0.5) ln(1.4).
    assert psi([0.5, 0.5], [30_000, 70_000]) == pytest.approx(0.16946, abs=1e-4)
    assert psi([0.5, 0.5], [0, 0]) == 0.0


@given(st.lists(st.integers(0, 500), min_size=2, max_size=20))
def test_the_index_of_equal_shares_is_zero_and_never_negative(counts: list[int]) -> None:
    total = sum(counts)
    if total:
        assert psi([count / total for count in counts], counts) <= 0.05
    assert psi([1.0] * len(counts), counts) >= 0.0


def test_every_request_is_in_one_bin_of_each_measure() -> None:
    counts = ShapeCounts()
    for shape in (RequestShape(0, 0, 0.0), RequestShape(1 << 30, 1 << 30, 1.0, 10_000)):
        counts.add(shape)
    shares = counts.shares()
    assert {name: len(shares[name]) for name in MEASURES} == BINS
    assert all(shares[name][0] == shares[name][-1] == 0.5 for name in MEASURES)
    assert LIMIT == 0.2


def test_a_window_joined_with_the_next_is_compared_with_the_usual_rate_of_both() -> None:
    watch = DriftWatch(CONVERSATION, [0.5] * 24)
    shape = RequestShape(1000, 200, 0.6, 2)
    times = [0.0, 1.0, *(600.0 + n for n in range(298))]
    assert [window for time in times for window in watch.add(time, shape)] == []
    (window,) = watch.advance(1200.0)
    assert (window.requests, window.rate_ratio) == (300, pytest.approx(300 / (0.5 * 1200)))
