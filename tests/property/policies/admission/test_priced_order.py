"""Property tests of parts of admission by price: fair shares, promised retry times, and pacing.

Pacing means that prompts are not sent to an engine faster than it may compute them.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from policies.admission.adaptive_session_limit import WorkingSet
from policies.admission.prefill_pacing import PrefillPace
from policies.admission.retry_after import ReturnSchedule, ReturnTimes
from policies.admission.tenant_demand import NEARLY, TenantDemand
from tests.unit.policies.builders import ask, candidate

LATEST_S = 58.0

tenants = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100.0), min_size=2, max_size=6)


@given(
    tenants, st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10.0)), st.floats(0.05, 1.0)
)
def test_the_level_shares_what_is_admitted_and_leaves_the_modest_alone(
    asked: dict[str, float], weights: dict[str, float], part: float
) -> None:
    usage = TenantDemand(weights)
    for name, work_s in asked.items():
        usage.record(name, work_s * part, admitted=True)
        usage.record(name, work_s * (1 - part), admitted=False)
    usage.tick(0.0)
    granted = sum(
        min(work_s, usage.level * weights.get(name, 1.0)) for name, work_s in asked.items()
    )
    assert granted == pytest.approx(NEARLY * part * sum(asked.values()), rel=1e-6)
    assert any(usage.price_share(name) > 0 for name in asked), "nobody would pay a price"
    for name, work_s in asked.items():
        if work_s <= usage.level * weights.get(name, 1.0):
            assert usage.price_share(name) == 0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 5.0), st.floats(0.0, 2.0)), max_size=80)
)
def test_promises_never_exceed_the_capacity_and_are_forgotten(
    refusals: list[tuple[int, float, float]],
) -> None:
    times = ReturnTimes(remembered=20, latest_s=LATEST_S)
    calendar, now, rng, per_s = ReturnSchedule(times), 0.0, Random(1), 3.0
    due: dict[int, list[float]] = {}
    for name, work_s, pause_s in refusals:
        now += pause_s
        key = (name, name)
        early = calendar.seconds_early(key, now)
        if early is not None:
            assert any(early == pytest.approx(moment - now) for moment in due[name])
            continue
        back_s = calendar.schedule(key, work_s, per_s, 0.0, replace(ask(now=now), rng=rng))
        assert back_s is not None
        assert len(calendar) <= 20
        assert calendar.scheduled_until_s <= now + LATEST_S + 1e-9
        if back_s == inf:
            assert calendar.scheduled_until_s + work_s / (times.share * per_s) > now + LATEST_S
            continue
        assert 0.0 <= back_s <= LATEST_S
        due.setdefault(name, []).append(now + back_s)
    for name, moments in list(due.items())[:3]:
        early = calendar.seconds_early((name, name), now)
        if early is not None:
            assert calendar.is_due((name, name), now + early)
        assert not calendar.is_due((name, name), max(moments) + 31.0)
    calendar.expire(now + 200.0)
    assert len(calendar) == 0


@given(st.lists(st.floats(0.05, 2.0), min_size=1, max_size=60))
def test_requests_that_look_equal_have_one_return_each(works_s: list[float]) -> None:
    calendar, rng, short = ReturnSchedule(), Random(2), (-7, 100)
    moments = []
    for work_s in works_s:
        back_s = calendar.schedule(short, work_s, 2.0, 0.0, replace(ask(now=0.0), rng=rng))
        assert back_s is not None
        moments.append(back_s)
    # A prompt that is too short to be recognised is never refused for coming early.
    assert calendar.seconds_early(short, 0.0) is None
    for moment in moments:
        assert calendar.is_due(short, moment)
        calendar.remove(short)
    assert len(calendar) == 0
    assert not calendar.is_due(short, moments[-1])


def test_nothing_is_promised_while_no_capacity_has_been_measured() -> None:
    calendar = ReturnSchedule()
    assert calendar.schedule((1, 1), 1.0, None, 0.0, ask()) is None
    assert len(calendar) == 0


@given(
    st.lists(
        st.tuples(st.floats(0.05, 5.0), st.floats(0.5, 16.0), st.floats(0.0, 2.0)),
        min_size=1,
        max_size=60,
    )
)
def test_no_second_is_promised_more_than_the_largest_capacity_that_was_measured(
    refusals: list[tuple[float, float, float]],
) -> None:
    schedule, now, most = ReturnSchedule(ReturnTimes(soonest_s=0.0)), 0.0, 0.0
    promised_s = 0.0
    for number, (work_s, per_s, pause_s) in enumerate(refusals):
        now += pause_s
        most = max(most, per_s)
        back_s = schedule.schedule((number, 1), work_s, per_s, 0.0, ask(now=now))
        assert back_s is not None
        promised_s += work_s if back_s < inf else 0.0
        ends, rates = zip(*schedule._levels, strict=True)
        assert list(ends) == sorted(ends)
        for rate, lower in pairwise(rates):
            assert lower < rate
        assert max(rates) <= 0.45 * most * (1 + 1e-9)
        assert promised_s <= max(ends) * 0.45 * most * (1 + 1e-9)


def test_a_faster_pool_promises_earlier_times_and_keeps_the_old_ones() -> None:
    schedule = ReturnSchedule(ReturnTimes(soonest_s=0.0))

    def back_s(number: int, per_s: float) -> float:
        seconds = schedule.schedule((number, 1), 1.0, per_s, 0.0, ask(now=0.0))
        assert seconds is not None
        return seconds

    # At 0.45 x 2 retries per second, 180 retries take 200 s.
    slow = [back_s(number, 2.0) for number in range(180)]
    assert slow[-1] == pytest.approx(200.0, abs=2.0)
    fast = [back_s(number, 4.0) for number in range(180, 360)]
    assert fast[0] <= 2.0
    # The second half of the faster pool's capacity lasts as long as the first half.
    assert fast[-1] == pytest.approx(200.0, abs=2.0)
    assert schedule.is_due((179, 1), slow[-1])
    assert back_s(360, 4.0) == pytest.approx(200.0, abs=2.0)
    assert [back_s(number, 4.0) for number in range(361, 379)][-1] == pytest.approx(210.0, abs=2.0)


def test_a_pool_that_becomes_slower_promises_nothing_before_the_times_given() -> None:
    schedule = ReturnSchedule(ReturnTimes(soonest_s=0.0))
    for number in range(90):
        schedule.schedule((number, 1), 1.0, 2.0, 0.0, ask(now=0.0))
    seconds = [
        schedule.schedule((number, 1), 1.0, 1.0, 0.0, ask(now=0.0)) for number in range(90, 99)
    ]
    assert all(back_s is not None and 100.0 <= back_s <= 120.0 for back_s in seconds)
    # The pool is fast again, but the capacity of the first hundred seconds is taken.
    again_s = schedule.schedule((99, 1), 1.0, 2.0, 0.0, ask(now=0.0))
    assert again_s is not None
    assert 100.0 <= again_s <= 103.0


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 4.0)), min_size=1, max_size=40))
def test_an_endpoint_is_never_given_more_than_its_pace_and_one_burst(
    prompts: list[tuple[float, float]],
) -> None:
    pace, tpot_s, burst_s = PrefillPace(1.0), 0.1, 1.5
    load = candidate(0, decoding=8).load
    load.timeline.decode_s = 0.03
    now, given_s, largest = 0.0, 0.0, 0.0
    for pause_s, prefill_s in prompts:
        now += pause_s
        if pace.ahead_s(load, tpot_s, now) <= burst_s:
            pace.record(load, prefill_s, tpot_s, now)
            given_s += prefill_s
            largest = max(largest, prefill_s)
        assert given_s <= 0.7 * now + burst_s + largest + 1e-9


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["began", "ended", "tick"]),
            st.sampled_from("abcde"),
            st.integers(1, 500),
        ),
        max_size=80,
    )
)
def test_the_working_sets_tokens_are_those_of_the_sessions_in_it(
    events: list[tuple[str, str, int]],
) -> None:
    inside, now = WorkingSet(), 0.0
    for what, name, size in events:
        now += size / 5
        if what == "began":
            inside.on_reserved(name, size, size // 2, size // 2, now)
        elif what == "ended":
            inside.on_ended(name, size + 10, size // 3, now)
        else:
            inside.tick(now)
        assert inside.tokens == sum(item.tokens for item in inside._active.values())
        assert 0.5 <= inside.memory_share <= 0.9
        assert 60.0 <= inside.memory_s <= 600.0
    assume(inside.tokens)
    for name in "abcde":
        inside.on_ended(name, None, None, now)
    inside.tick(now + 5000.0)
    inside.tick(now + 10_000.0)
    assert inside.tokens >= 0
