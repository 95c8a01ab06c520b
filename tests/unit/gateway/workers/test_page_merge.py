"""Tests of combining the admin pages of several workers: endpoints and policies on trial."""

from __future__ import annotations

import pytest

from gateway.metrics.quantile_sketch import BucketCounts, bucket_of
from gateway.trials.canary import summarize_arm
from gateway.workers import page_merge


def endpoint(in_flight: int, *, available: bool) -> dict[str, object]:
    state = "up" if available else "ejected"
    rest = {
        "connections": 1,
        "in_flight_elsewhere": 9,
        "state": state,
        "cause": None,
        "slow": None,
        "back_in_s": None,
    }
    return {
        "pool": "main",
        "url": "http://a:1",
        "in_flight": in_flight,
        "available": available,
    } | rest


def test_an_available_endpoint_is_slow_if_any_worker_says_so() -> None:
    slow = endpoint(1, available=True) | {"slow": {"ratio": 4.1}}
    out = endpoint(1, available=False)
    for rows, expected in (
        ([endpoint(1, available=True), slow, endpoint(1, available=True)], {"ratio": 4.1}),
        ([slow, endpoint(1, available=True)], {"ratio": 4.1}),
        ([out, slow], None),
        ([slow, out], None),
    ):
        (merged,) = page_merge.merge_endpoints([{"endpoints": [row]} for row in rows])["endpoints"]
        assert merged["slow"] == expected


def test_an_endpoint_is_listed_once_with_sums_and_is_available_if_all_workers_agree() -> None:
    merged = page_merge.merge_endpoints(
        [
            {"endpoints": [endpoint(2, available=True)], "pairs": []},
            {"endpoints": [endpoint(3, available=False)], "pairs": []},
        ]
    )
    (one,) = merged["endpoints"]
    assert (one["in_flight"], one["in_flight_elsewhere"], one["connections"]) == (5, 0, 2)
    assert (one["available"], one["state"]) == (False, "ejected")
    assert merged["pairs"] == []


def shadows(picks: int, agreed: int, differed: int, gain_s: float | None) -> dict[str, object]:
    answered = agreed + differed
    policy = {
        "policy": "priced",
        "agreed": agreed,
        "differed": differed,
        "no_endpoint": 0,
        "failed": 1,
        "agreement": agreed / answered if answered else None,
        "ttft_gain_s": gain_s,
        "cached_tokens_gain": 10.0 if answered else None,
        "cost_us": 8.0,
    }
    pool = {
        "pool": "main",
        "picks": picks,
        "scored": answered + 1,
        "pick_us": 20.0,
        "cost_share": 0.1,
    }
    return {"shadows": [pool | {"policies": [policy]}]}


def test_shadow_results_cover_the_requests_of_all_workers() -> None:
    (merged,) = page_merge.merge_shadows(
        [shadows(100, 30, 10, 0.2), shadows(300, 10, 0, -0.2), shadows(0, 0, 0, None)]
    )["shadows"]
    assert (merged["picks"], merged["scored"], merged["pick_us"], merged["cost_share"]) == (
        400,
        53,
        20.0,
        0.1,
    )
    assert merged["policies"] == [
        {
            "policy": "priced",
            "agreed": 40,
            "differed": 10,
            "no_endpoint": 0,
            "failed": 3,
            "conclusive": False,
            "agreement": 0.8,
            "ttft_gain_s": 0.12,
            "cached_tokens_gain": 10.0,
            "cost_us": 8.0,
        }
    ]
    assert page_merge.merge_shadows([{"shadows": []}, {"shadows": []}]) == {"shadows": []}


def test_scores_of_all_workers_decide_whether_a_shadow_is_conclusive() -> None:
    (merged,) = page_merge.merge_shadows([shadows(100, 50, 10, 0.1), shadows(100, 30, 10, 0.1)])[
        "shadows"
    ]
    assert merged["policies"][0]["conclusive"] is True


def canary(met: int, late: int, ttft: BucketCounts) -> dict[str, object]:
    arms = [
        summarize_arm("primary", "a", {"met": met, "ttft": late, "unknown": 1}, ttft),
        summarize_arm("canary", "b", {}, {}),
    ]
    return {"canaries": [{"pool": "main", "share": "5 %", "arms": arms}]}


def test_canary_arms_cover_the_requests_and_observations_of_all_workers() -> None:
    quick, slow = {bucket_of(0.1): 60}, {bucket_of(1.0): 100}
    (merged,) = page_merge.merge_canaries([canary(50, 10, quick), canary(70, 30, slow)])["canaries"]
    primary, other = merged["arms"]
    assert (primary["requests"], primary["goodput"]) == (162, 0.75)
    assert primary["ttft_p50_s"] == primary["ttft_p99_s"] == pytest.approx(1.0, rel=0.011)
    assert (other["requests"], other["goodput"], other["ttft_p50_s"]) == (0, None, None)
