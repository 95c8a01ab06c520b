"""Tests of the results of a simulation, computed from handmade records."""

from __future__ import annotations

import pytest

from planner.replay import ReplayRecord, ReplayRun, RequestEnd
from planner.replay.capacity_search import capacity
from planner.replay.results import GroupTotals, figures, jain, regret
from policies.routing_types import Slo

FAST = Slo("fast", 1.0, 0.1)


def record(
    at: float, ttft: float | None = 0.5, tpot: float = 0.05, **other: object
) -> ReplayRecord:
    one = ReplayRecord(0, at, 1000, 11, FAST)
    if ttft is not None:
        one.entered_s, one.first_s, one.end = at, at + ttft, RequestEnd.SERVED
        one.done_s = one.first_s + 10 * tpot
    for name, value in other.items():
        setattr(one, name, value)
    return one


def run(*records: ReplayRecord, **other: object) -> ReplayRun:
    return ReplayRun("p", "f", list(records), ended_s=100.0, **other)  # type: ignore[arg-type]


def test_a_good_request_keeps_both_budgets() -> None:
    assert record(0.0).is_good
    assert not record(0.0, ttft=1.1).is_good
    assert not record(0.0, tpot=0.11).is_good
    assert not record(0.0, ttft=None).is_good
    assert record(0.0, tpot=9.0, output_tokens=1).is_good


def test_rates_are_of_the_span_in_which_requests_came() -> None:
    summary = figures(run(record(0.0), record(5.0, ttft=3.0), record(10.0)))
    assert (summary.attainment, summary.goodput, summary.span_s) == (
        pytest.approx(2 / 3),
        0.2,
        10.0,
    )
    assert summary.token_goodput == pytest.approx(2 * 1011 / 10)


def test_refused_and_lost_requests_are_offered_ones_that_were_not_good() -> None:
    summary = figures(
        run(
            record(0.0),
            record(1.0, None, end=RequestEnd.SHED, reason="price"),
            record(2.0, None, end=RequestEnd.LOST),
        )
    )
    assert summary.attainment == pytest.approx(1 / 3)
    assert summary.ends == {"served": 1, "shed": 1, "lost": 1}
    assert summary.reasons == {"price": 1}


def test_what_the_horizon_cut_is_a_miss_only_when_it_was_late_already() -> None:
    early, late = record(99.9, None, end=RequestEnd.CUT), record(50.0, None, end=RequestEnd.CUT)
    assert figures(run(record(0.0), early)).attainment == 1.0
    assert figures(run(record(0.0), late)).attainment == 0.5


def test_warm_up_does_not_count() -> None:
    assert figures(run(record(0.0, ttft=9.0), record(10.0)), from_s=5.0).attainment == 1.0


def test_without_counted_requests_attainment_is_zero() -> None:
    assert figures(run(record(0.0), record(10.0)), from_s=60.0).attainment == 0.0


def test_hits_are_reported_of_all_prompts_and_of_an_unlimited_cache() -> None:
    summary = figures(
        run(
            record(0.0, cached_tokens=200, ideal_tokens=400),
            record(1.0, cached_tokens=100, ideal_tokens=200),
        )
    )
    assert (summary.hit_ratio, summary.of_ideal) == (0.15, 0.5)


def test_waste_is_prefill_of_unserved_requests() -> None:
    summary = figures(run(record(0.0), record(1.0, None, end=RequestEnd.LEFT, wasted_tokens=250)))
    assert summary.wasted == 0.2


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    groups = [
        GroupTotals("a", prompt_tokens=300, cached_tokens=100),
        GroupTotals("b", output_tokens=100),
    ]
    assert figures(run(record(0.0), groups=groups)).imbalance == pytest.approx(4 / 3)


def test_tenants_are_compared_by_how_much_of_theirs_was_good() -> None:
    mine = [record(number, tenant="a") for number in range(4)]
    yours = [record(number, ttft=0.5 if number else 2.0, tenant="b") for number in range(2)]
    summary = figures(run(*mine, *yours))
    assert summary.worst_tenant == 0.5
    assert summary.jain == pytest.approx(1.5**2 / (2 * 1.25))
    assert summary.tenants["b"].good == 1
    assert jain([3.0, 3.0]) == jain([]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25


def test_errors_of_predictions_are_relative_to_what_came() -> None:
    one = record(0.0, predicted_ttft_s=0.6, predicted_tpot_s=0.04)
    summary = figures(run(one, record(1.0)))
    assert (summary.ttft_error, summary.tpot_error) == (pytest.approx(0.2), pytest.approx(0.2))
    assert summary.ttft_error_p50 == pytest.approx(0.2)


def test_first_retries_count_returning_clients() -> None:
    returned = record(0.0, refusals=1)
    summary = figures(
        run(
            returned,
            record(1.0, refusals=2),
            record(2.0, None, refusals=1, end=RequestEnd.SHED),
            record(3.0),
        )
    )
    assert summary.at_first_retry == 0.5


def test_regret_is_the_worst_ratio_to_the_best_of_the_others() -> None:
    mine = {"chat": 1.9, "agents": 3.0, "nobody can": 0.0}
    others = [{"chat": 2.0, "agents": 1.0, "nobody can": 0.0}, {"chat": 1.0, "agents": 2.0}]
    assert regret(mine, others) == pytest.approx(0.95)


@pytest.mark.parametrize("knee", [0.02, 0.3, 1.0, 2.52, 40.0])
@pytest.mark.parametrize("target", [0.9, 0.99])
def test_capacity_is_where_attainment_crosses_the_target(knee: float, target: float) -> None:
    def attainment(load: float) -> float:
        return max(0.0, min(1.0, 1.0 - (1 - target) * (load / knee) ** 3))

    result = capacity(attainment, target)
    assert result.load == pytest.approx(knee, rel=0.005)
    assert len(result.tried) == len({load for load, _ in result.tried}) < 20


def test_capacity_has_ends() -> None:
    assert capacity(lambda load: 0.5).load == 0.0
    assert capacity(lambda load: 1.0).load >= 64.0
