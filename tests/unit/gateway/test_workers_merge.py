"""Several workers' pages as one: sums, the catalogue's rules, label values of any kind."""

from __future__ import annotations

import pytest

from gateway.canary import figures
from gateway.meters import Merge
from gateway.metrics import Metrics
from gateway.sketch import Counts, bucket_of
from gateway.workers import merge

RULES = {spec.name: spec.merge for spec in Metrics().catalogue()}


def page(requests: int, up: float, ttft_s: float) -> str:
    metrics = Metrics()
    metrics.requests_total.labels('a "model"\\\n', "200", "served").inc(requests)
    metrics.endpoint_up.labels("a:1").set(up)
    metrics.shared_staleness_seconds.set(ttft_s)
    metrics.ttft_seconds.labels("m", "a:1").observe(ttft_s)
    return metrics.render().decode()


def test_counters_and_histograms_are_summed_and_gauges_follow_their_rules() -> None:
    merged = merge.metrics([page(3, 1.0, 0.002), page(4, 0.0, 0.03)], RULES)
    assert 'penstock_requests_total{code="200",model="a \\"model\\"\\\\\\n",reason="served"} 7.0' in merged
    assert 'penstock_endpoint_up{endpoint="a:1"} 0.0' in merged
    assert "penstock_shared_staleness_seconds 0.03" in merged
    assert 'penstock_ttft_seconds_count{endpoint="a:1",model="m"} 2.0' in merged
    assert 'penstock_ttft_seconds_bucket{endpoint="a:1",le="0.005",model="m"} 1.0' in merged
    assert 'penstock_ttft_seconds_bucket{endpoint="a:1",le="+Inf",model="m"} 2.0' in merged


def test_one_page_says_the_same_after_merging() -> None:
    alone = page(3, 1.0, 0.002)
    again = merge.metrics([merge.metrics([alone], RULES)], RULES)
    assert again == merge.metrics([alone], RULES)
    assert again.count("# TYPE ") == alone.count("# TYPE ")


def test_a_process_started_when_the_first_of_its_workers_did() -> None:
    pages = [f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {at}.0\n" for at in (7, 5)]
    assert "process_start_time_seconds 5.0" in merge.metrics(pages, {})


def test_files_and_their_limits_are_summed_alike_so_that_their_ratio_is_the_mean_of_the_processes() -> None:
    page = "# TYPE process_open_fds gauge\nprocess_open_fds {}.0\n# TYPE process_max_fds gauge\nprocess_max_fds 100.0\n"
    merged = merge.metrics([page.format(10), page.format(30)], RULES)
    assert "process_open_fds 40.0\n" in merged
    assert "process_max_fds 200.0\n" in merged


def test_the_last_word_counts_where_the_rule_says_so() -> None:
    pages = [f"# TYPE x gauge\nx {value}.0\n" for value in (3, 1)]
    assert "x 1.0" in merge.metrics(pages, {"x": Merge.LAST})
    assert "x 3.0" in merge.metrics(pages, {"x": Merge.MAX})


def endpoint(in_flight: int, *, available: bool) -> dict[str, object]:
    state = "up" if available else "ejected"
    rest = {"connections": 1, "in_flight_elsewhere": 9, "state": state, "cause": None, "slow": None, "back_in_s": None}
    return {"pool": "main", "url": "http://a:1", "in_flight": in_flight, "available": available} | rest


def test_an_endpoint_stands_once_with_what_all_workers_have_there_and_is_up_when_all_say_so() -> None:
    merged = merge.endpoints(
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
        "nobody": 0,
        "failed": 1,
        "agreement": agreed / answered if answered else None,
        "ttft_gain_s": gain_s,
        "cached_tokens_gain": 10.0 if answered else None,
        "cost_us": 8.0,
    }
    pool = {"pool": "main", "picks": picks, "scored": answered + 1, "pick_us": 20.0, "cost_share": 0.1}
    return {"shadows": [pool | {"policies": [policy]}]}


def test_what_shadows_came_to_is_of_all_workers_requests() -> None:
    (merged,) = merge.shadows([shadows(100, 30, 10, 0.2), shadows(300, 10, 0, -0.2), shadows(0, 0, 0, None)])["shadows"]
    assert (merged["picks"], merged["scored"], merged["pick_us"], merged["cost_share"]) == (400, 53, 20.0, 0.1)
    assert merged["policies"] == [
        {
            "policy": "priced",
            "agreed": 40,
            "differed": 10,
            "nobody": 0,
            "failed": 3,
            "conclusive": False,
            "agreement": 0.8,
            "ttft_gain_s": 0.12,
            "cached_tokens_gain": 10.0,
            "cost_us": 8.0,
        }
    ]
    assert merge.shadows([{"shadows": []}, {"shadows": []}]) == {"shadows": []}


def test_the_scores_of_all_workers_together_decide_whether_a_shadow_can_be_judged() -> None:
    (merged,) = merge.shadows([shadows(100, 50, 10, 0.1), shadows(100, 30, 10, 0.1)])["shadows"]
    assert merged["policies"][0]["conclusive"] is True


def canary(met: int, late: int, ttft: Counts) -> dict[str, object]:
    sides = [figures("primary", "a", {"met": met, "ttft": late, "untold": 1}, ttft), figures("canary", "b", {}, {})]
    return {"canaries": [{"pool": "main", "share": "5 %", "sides": sides}]}


def test_a_canarys_sides_are_of_all_workers_requests_and_their_percentiles_of_all_observations() -> None:
    quick, slow = {bucket_of(0.1): 60}, {bucket_of(1.0): 100}
    (merged,) = merge.canaries([canary(50, 10, quick), canary(70, 30, slow)])["canaries"]
    primary, other = merged["sides"]
    assert (primary["requests"], primary["goodput"]) == (162, 0.75)
    assert primary["ttft_p50_s"] == primary["ttft_p99_s"] == pytest.approx(1.0, rel=0.011)
    assert (other["requests"], other["goodput"], other["ttft_p50_s"]) == (0, None, None)
