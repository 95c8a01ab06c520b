"""Tests that a refused client is admitted when it retries at the stated time.

Time is simulated.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from statistics import mean

import pytest
from msgspec.structs import replace

from bench.load.overload_plan import GROUP, POLICY, SLO, Phase, arrivals, trace_request
from planner.replay import ClientBehaviour, FleetSpec, ReplayOptions, ReplayRun, replay, traffic
from planner.replay.results import ReplayRecord
from planner.traces.recorded_request import PRIVATE
from policies import policy_registry
from policies.admission_registry import build_admission

SURGE = 60.0, 180.0
END_S = 660.0
LONGEST_S = 300.0
PLACES = 32  # number of requests that one group runs at once under the admission policy `cap`

SETTINGS = {
    # admission: requests per second at capacity, and the load of the surge
    "priced": (4.2, 6.0),
    "cap": (2.35, 2.0),
}


@cache
def surge(admission: str) -> ReplayRun:
    per_s, load = SETTINGS[admission]
    phases = (
        Phase("before", SURGE[0], 0.8),
        Phase("surge", SURGE[1] - SURGE[0], load),
        Phase("after", END_S - SURGE[1], 0.8),
    )
    names = count(PRIVATE)
    requests = [
        trace_request(each.prompt_tokens, each.output_tokens, each.due_s, names)
        for each in arrivals(phases, per_s, 1)
    ]
    kind = replace(GROUP, count=1)
    if admission == "cap":
        kind = replace(kind, max_concurrency=PLACES)
    options = ReplayOptions(
        expected_output=None,
        standard=SLO,
        horizon_s=END_S + 60.0,
        clients=ClientBehaviour(retries=3),
    )
    spec = FleetSpec("one group", (kind,), block_tokens=16)
    policy = policy_registry.build(POLICY, {})
    return replay(spec, traffic(requests), policy, build_admission(admission, {}), options)


def refused(admission: str) -> list[ReplayRecord]:
    # Return the refused requests whose clients would have retried before the end.
    return [
        record
        for record in surge(admission).records
        if record.refused_s is not None and (record.promised_s or 0.0) < END_S
    ]


def promised(admission: str) -> list[ReplayRecord]:
    return [record for record in refused(admission) if record.promised_s is not None]


def finished_per_s(admission: str, begin_s: float, end_s: float) -> float:
    ended = [record for record in surge(admission).records if record.done_s is not None]
    return sum(begin_s <= record.done_s < end_s for record in ended) / (end_s - begin_s)  # type: ignore[operator]


@pytest.mark.parametrize("admission", SETTINGS)
def test_clients_get_a_time_within_five_minutes_or_do_not_return(admission: str) -> None:
    for record in refused(admission):
        assert record.refused_s is not None
        if record.promised_s is None:
            assert record.refusals == 1
        else:
            assert 0.0 < record.promised_s - record.refused_s <= LONGEST_S
    waits_s = [each.promised_s - each.refused_s for each in promised(admission)]  # type: ignore[operator]
    assert len(waits_s) > 100
    assert max(waits_s) > 120.0


def test_a_long_surge_sends_some_clients_away_for_good() -> None:
    gone = [record for record in refused("priced") if record.promised_s is None]
    assert len(gone) > 500
    during = [record for record in gone if SURGE[0] <= record.arrived_s < SURGE[1]]
    assert len(during) > 0.95 * len(gone)


@pytest.mark.parametrize("admission", SETTINGS)
def test_nine_in_ten_clients_are_admitted_at_their_first_return(admission: str) -> None:
    returned = promised(admission)
    admitted = [record for record in returned if record.refusals == 1 and record.entered_s]
    assert len(admitted) / len(returned) >= 0.9


@pytest.mark.parametrize("admission", SETTINGS)
def test_promised_waits_are_within_a_fifth_of_the_wait_until_admission(admission: str) -> None:
    waits = [
        (record.promised_s - record.refused_s) / (record.entered_s - record.refused_s)  # type: ignore[operator]
        for record in promised(admission)
        if record.entered_s is not None and record.promised_s - record.refused_s > 5.0  # type: ignore[operator]
    ]
    assert len(waits) > 100
    assert sum(0.8 <= share <= 1.2 for share in waits) / len(waits) >= 0.95


@pytest.mark.parametrize("admission", SETTINGS)
def test_the_pool_works_at_its_full_rate_while_clients_wait_to_return(admission: str) -> None:
    last_s = max(record.promised_s or 0.0 for record in promised(admission))
    assert last_s > SURGE[1] + 150.0
    full = finished_per_s(admission, SURGE[0] + 30.0, SURGE[1])
    assert finished_per_s(admission, SURGE[1], min(last_s, END_S) - 30.0) >= full / 1.2


def test_goodput_under_a_surge_is_that_of_a_full_pool() -> None:
    good = [
        record.entered_s is not None
        and record.first_s is not None
        and record.first_s - record.entered_s <= SLO.ttft_s
        and (record.tpot_s or 0.0) <= SLO.tpot_s
        for record in surge("priced").records
        if record.done_s is not None and SURGE[0] <= record.done_s < END_S
    ]
    assert mean(good) >= 0.95


@pytest.mark.parametrize("admission", SETTINGS)
def test_at_four_fifths_of_capacity_nothing_is_refused_and_nothing_waits_for_long(
    admission: str,
) -> None:
    before = [record for record in surge(admission).records if record.arrived_s < SURGE[0]]
    assert len(before) > 50
    assert not any(record.refusals for record in before)
    assert all(record.entered_s - record.arrived_s < 0.5 for record in before)  # type: ignore[operator]
