"""Property tests of how much capacity is reserved for batch jobs, so that they end in time.

A simulated pool has places, each of which runs one request at a time. Live requests use most of
them, and leave `idle` ones to batch jobs; their number changes every few seconds. If batch jobs may
not end in time on these, the rule reserves places for them. They then use the idle or the reserved
places, whichever are more. Time is virtual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.batch_reserve import (
    HEADROOM,
    WindowDemand,
    WindowPlan,
    WindowPlanner,
    places_needed,
)

STEP_S = 0.25


class Job(NamedTuple):
    """A simulated batch job: its deadline, and the seconds that each of its requests takes."""

    ends_s: float
    requests_s: tuple[float, ...]


class Outcome(NamedTuple):
    """How simulated batch jobs ended on a pool, and what was reserved for them meanwhile.

    ended_s  the time at which each batch job ended
    plans    what the rule decided at each step, with the demands that it was given
    """

    ended_s: list[float]
    plans: list[tuple[WindowPlan, list[WindowDemand]]]

    @property
    def taken_s(self) -> float:
        return sum(plan.places for plan, _ in self.plans) * STEP_S


class Pool:
    """A simulated pool of places for requests, on which batch jobs run.

    jobs     the batch jobs
    reserve  how many places the tested rule may reserve for them
    idle     function that returns the number of places that live requests leave free at a time
    """

    def __init__(self, jobs: list[Job], reserve: int, idle: Callable[[float], int]) -> None:
        self._jobs, self._reserve, self._idle = jobs, reserve, idle
        self._waiting = [list(job.requests_s) for job in jobs]
        self._running: list[tuple[int, float]] = []  # (batch, seconds left) of each running request
        self._planner = WindowPlanner()

    def demands(self, now: float) -> list[WindowDemand]:
        result = []
        for index, job in enumerate(self._jobs):
            left = [s for batch, s in self._running if batch == index] + self._waiting[index]
            if left:
                longest_s = max(left)
                result.append(WindowDemand(str(index), job.ends_s - now, sum(left), longest_s))
        return result

    def run(self) -> Outcome:
        ended_s, plans, now = [math.inf] * len(self._jobs), [], 0.0
        while demands := self.demands(now):
            plan = self._planner.plan(demands, self._reserve, 0.0)
            plans.append((plan, demands))
            # Running requests continue to their end, because interrupting one would cost work.
            places = max(self._idle(now), plan.places)
            self._start(places - len(self._running), plan)
            self._advance()
            now += STEP_S
            for index in range(len(self._jobs)):
                is_over = not self._waiting[index] and index not in dict(self._running)
                ended_s[index] = min(ended_s[index], now) if is_over else math.inf
            assert now < 1e6
        return Outcome(ended_s, plans)

    def _start(self, count: int, plan: WindowPlan) -> None:
        order = sorted(range(len(self._jobs)), key=lambda index: self._jobs[index].ends_s)
        hurried = [int(name) for name in plan.hurried]
        for index in (*hurried, *order):
            while count > 0 and self._waiting[index]:
                self._running.append((index, self._waiting[index].pop(0)))
                count -= 1

    def _advance(self) -> None:
        self._running = [(batch, s - STEP_S) for batch, s in self._running if s > STEP_S]


durations_s = st.integers(1, 20).map(float)
jobs = st.lists(
    st.builds(
        Job,
        st.integers(30, 400).map(float),
        st.lists(durations_s, min_size=1, max_size=40).map(tuple),
    ),
    min_size=1,
    max_size=4,
)
reserves = st.integers(1, 6)
spare_places = st.integers(0, 3)
idle_places = st.lists(st.integers(0, 8), min_size=1, max_size=12)


def cycle(levels: Iterable[int]) -> Callable[[float], int]:
    steps = list(levels)
    return lambda now: steps[int(now / 7.0) % len(steps)]


def needs(batches: list[Job]) -> list[float]:
    # Return how many places are needed at time 0 for the batches up to each end of a window.
    ordered = sorted(batches)
    result = []
    for count in range(1, len(ordered) + 1):
        requests_s = [s for job in ordered[:count] for s in job.requests_s]
        usable_s = HEADROOM * ordered[count - 1].ends_s
        result.append(places_needed(sum(requests_s), max(requests_s), usable_s))
    return result


def places_for(batches: list[Job], spare: int) -> int:
    # Return the least number of places that is more than the batches need, and `spare` more.
    return int(max(needs(batches))) + 1 + spare


@given(jobs, spare_places, idle_places)
def test_batches_that_fit_the_reserve_are_never_late_whatever_else_runs(
    batches: list[Job], spare: int, idle: list[int]
) -> None:
    outcome = Pool(batches, places_for(batches, spare), cycle(idle)).run()
    assert all(ended <= job.ends_s for ended, job in zip(outcome.ended_s, batches, strict=True))


@given(jobs, spare_places, spare_places)
def test_no_place_is_taken_while_the_idle_ones_suffice(
    batches: list[Job], spare: int, spare_idle: int
) -> None:
    idle = places_for(batches, spare_idle)
    outcome = Pool(batches, places_for(batches, spare), lambda _: idle).run()
    assert outcome.taken_s == 0
    assert all(ended <= job.ends_s for ended, job in zip(outcome.ended_s, batches, strict=True))


@given(jobs, reserves, idle_places)
def test_no_place_is_taken_before_the_last_moment(
    batches: list[Job], reserve: int, idle: list[int]
) -> None:
    was_taken = False
    for plan, demands in Pool(batches, reserve, cycle(idle)).run().plans:
        if plan.places and not was_taken:
            # If the reserve started later, at least one completion window could not be kept.
            ordered = sorted(demands, key=lambda demand: demand.left_s)
            work_s = longest_s = 0.0
            found = []
            for demand in ordered:
                work_s += demand.work_s
                longest_s = max(longest_s, demand.longest_s)
                ends_s = (work_s - longest_s) / reserve + longest_s
                found.append(ends_s >= HEADROOM * demand.left_s - 1e-9)
            assert any(found)
        assert 0 <= plan.places <= reserve
        was_taken = plan.places > 0


@given(jobs, reserves, idle_places)
def test_the_earliest_window_comes_first_among_the_batches_that_can_be_in_time(
    batches: list[Job], reserve: int, idle: list[int]
) -> None:
    for plan, demands in Pool(batches, reserve, cycle(idle)).run().plans:
        left_s = {demand.id: demand.left_s for demand in demands}
        for group in (
            [name for name in plan.hurried if name not in plan.behind],
            [name for name in plan.hurried if name in plan.behind],
        ):
            assert group == sorted(group, key=lambda name: (left_s[name], name))
        can = [name in plan.behind for name in plan.hurried]
        assert can == sorted(can)


@given(jobs, idle_places)
def test_without_a_reserve_no_place_is_taken_and_no_batch_goes_first(
    batches: list[Job], idle: list[int]
) -> None:
    for plan, _ in Pool(batches, 0, cycle([*idle, 1])).run().plans:
        assert (plan.places, plan.hurried) == (0, ())


def test_a_batch_that_cannot_be_in_time_does_not_delay_one_that_can() -> None:
    hopeless = WindowDemand("hopeless", 10.0, 1000.0, 5.0)
    able = WindowDemand("able", 120.0, 150.0, 5.0)
    plan = WindowPlanner().plan([hopeless, able], 2, 0.0)
    assert plan == WindowPlan(2, ("hopeless",), frozenset({"hopeless"}))
    able = WindowDemand("able", 95.0, 150.0, 5.0)  # two places are sure to take 77.5 s
    plan = WindowPlanner().plan([hopeless, able], 2, 0.0)
    assert plan == WindowPlan(2, ("able", "hopeless"), frozenset({"hopeless"}))


@pytest.mark.parametrize(("supply", "is_behind"), [(0.0, True), (49.0, True), (50.0, False)])
def test_places_that_batches_have_had_recently_count_for_whether_one_is_behind(
    supply: float, is_behind: bool
) -> None:
    demand = WindowDemand("a", 100.0, 50.0 * 90.0 + 10.0, 10.0)
    plan = WindowPlanner().plan([demand], 4, supply)
    assert (plan.places, plan.hurried, bool(plan.behind)) == (4, ("a",), is_behind)


def test_a_batch_without_a_measured_request_gets_one_place_and_is_not_called_late() -> None:
    unknown = WindowDemand("a", 10.0, 1000.0, 5.0, is_known=False)
    assert WindowPlanner().plan([unknown], 4, 0.0) == WindowPlan(1, ("a",))
    known = WindowDemand("b", 11.0, 1000.0, 5.0)
    plan = WindowPlanner().plan([unknown, known], 4, 0.0)
    assert plan == WindowPlan(4, ("a", "b"), frozenset("b"))


def test_a_batch_without_a_measured_request_begins_earlier_by_one_request() -> None:
    # On four places, 13 s of requests of up to 1 s end within 4 s, which are 0.8 of 5 s. Before
    # them, an unmeasured batch runs one of 1 s alone: 5 s are 0.8 of 6.25 s.
    for left_s, is_known, places in (
        (5.1, True, 0),
        (4.9, True, 4),
        (6.3, False, 0),
        (6.2, False, 1),
    ):
        demand = WindowDemand("a", left_s, 13.0, 1.0, is_known)
        assert WindowPlanner().plan([demand], 4, 0.0).places == places


def test_without_a_reserve_a_batch_is_behind_once_it_needs_a_whole_place() -> None:
    planner = WindowPlanner()
    plans = [planner.plan([WindowDemand("a", 100.0, w_s, 5.0)], 0, 0.0) for w_s in (99.0, 101.0)]
    assert [plan.behind for plan in plans] == [frozenset(), frozenset("a")]


def test_places_stay_reserved_until_the_reserve_would_do_in_two_fifths_of_the_time() -> None:
    planner = WindowPlanner()
    places = [
        planner.plan([WindowDemand("a", 125.0, work_s, 0.0)], 4, 0.0).places
        for work_s in (399.0, 401.0, 399.0, 250.0, 201.0, 199.0, 399.0)
    ]
    assert places == [0, 4, 4, 3, 3, 0, 0]


def test_the_last_requests_of_a_batch_keep_their_places() -> None:
    planner = WindowPlanner()
    assert planner.plan([WindowDemand("a", 100.0, 9.0, 4.0)], 2, 0.0).places == 0
    assert planner.plan([WindowDemand("a", 100.0, 8.0, 4.0)], 2, 0.0).places == 0
    assert planner.plan([WindowDemand("a", 8.0, 10.0, 4.0)], 2, 0.0).places == 2
    assert planner.plan([WindowDemand("a", 100.0, 8.0, 4.0)], 2, 0.0).places == 1
    assert planner.plan([WindowDemand("a", 100.0, 0.0, 0.0)], 2, 0.0).places == 0
