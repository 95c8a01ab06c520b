"""Tests of the estimate of how much work a batch still needs."""

from __future__ import annotations

import pytest

from gateway.batch.remaining_work import TICK_S, RequestTimes


def test_work_left_is_that_of_all_requests_without_the_part_that_was_done() -> None:
    times = RequestTimes()
    times.add_result(0, 10.0 - TICK_S)
    times.add_result(1, 20.0 - TICK_S)
    times.add_attempt(2, 4.0, is_kept=True)
    times.add_attempt(3, 9.0, is_kept=False)
    # Five requests need 15 s each; of the third, 4 s are done, and of the fifth, 6 s.
    assert times.estimate(5, {4: 6.0}, None) == (65.0, 20.0)


def test_an_answer_in_parts_counts_with_all_of_them_and_one_begun_again_with_the_last() -> None:
    times = RequestTimes()
    times.add_attempt(0, 4.0, is_kept=True)
    times.add_attempt(0, 5.0, is_kept=True)
    times.add_result(0, 6.0 - TICK_S)
    times.add_attempt(1, 30.0, is_kept=False)
    times.add_result(1, 5.0 - TICK_S)
    assert times.estimate(10, {}, None) == (100.0, 15.0)


def test_an_answer_beyond_the_mean_is_expected_to_end_soon_but_not_at_once() -> None:
    times = RequestTimes()
    times.add_result(0, 10.0 - TICK_S)
    times.add_attempt(1, 15.0, is_kept=True)
    assert times.estimate(2, {1: 10.0}, None) == (11.0, 25.0)
    assert times.estimate(1, {1: 10.0}, None) == (1.0, 1.0)


def test_once_all_requests_run_the_longest_is_what_the_youngest_may_still_need() -> None:
    times = RequestTimes()
    times.add_result(0, 10.0 - TICK_S)
    times.add_result(1, 20.0 - TICK_S)
    assert times.estimate(2, {2: 14.0, 3: 3.0}, None) == (1.5 + 12.0, 17.0)


@pytest.mark.parametrize(
    ("running", "usual_s", "expected"),
    [
        ({}, None, (0.0, 0.0)),
        ({}, 3.0, (48.0, 12.0)),
        ({0: 15.0}, 3.0, (46.5, 15.0)),
        ({0: 5.0}, None, (15.5, 5.0)),
    ],
)
def test_before_a_request_has_ended_it_is_expected_to_take_longer_than_those_of_the_pool(
    running: dict[int, float], usual_s: float | None, expected: tuple[float, float]
) -> None:
    assert RequestTimes().estimate(4, running, usual_s) == expected


def test_the_next_owner_continues_with_the_mean_and_the_longest_time() -> None:
    times = RequestTimes()
    assert times.measured is None
    times.add_result(0, 10.0 - TICK_S)
    times.add_result(1, 20.0 - TICK_S)
    assert times.measured == (15.0, 20.0)
    assert RequestTimes(times.measured).estimate(4, {}, 99.0) == (60.0, 20.0)
