"""Tests of the live page of several workers: sums, combined status, totals that never decrease."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from gateway.admin.live_fleet_status import FleetStatus, PairStatus
from gateway.admin.live_metric_samples import MetricSample, SampleHistory
from gateway.admin.live_view import build_view
from gateway.workers.live_view_merge import LiveViewMerger, merge_statuses
from gateway.workers.worker_process import Worker, WorkerResponse
from tests.unit.gateway.admin.empty import mark


class Stub:
    def __init__(self, noted: MetricSample, standing: FleetStatus) -> None:
        self.noted, self.standing, self.lost = noted, standing, False

    async def request(self, method: str, path: str, timeout_s: float) -> WorkerResponse:
        assert (method, path) == ("GET", "/live/note")
        if self.lost:
            raise TimeoutError
        return WorkerResponse(200, {}, msgspec.msgpack.encode((self.noted, self.standing)))


def watch(*stubs: Stub) -> tuple[LiveViewMerger, list[Stub]]:
    serving = list(stubs)
    return LiveViewMerger(lambda: cast("list[Worker]", serving)), serving


def endpoint(in_flight: int, **more: Any) -> dict[str, Any]:
    known = {
        "name": "a:1",
        "url": "http://a:1",
        "pool": "main",
        "role": "both",
        "in_flight": in_flight,
    }
    calm = {"state": "up", "cause": None, "slow": None, "since_s": None, "available": True}
    return (
        known
        | calm
        | {"silence_s": 1.0, "waiting": 0, "backlog_tokens": 0, "backlog_s": 0.0}
        | more
    )


def standing(in_flight: int = 0, **more: Any) -> FleetStatus:
    pool = {"name": "main", "in_flight": in_flight, "waiting": in_flight, "price": 0.5 * in_flight}
    made = FleetStatus(
        {"version": 1},
        {"standard": (5.0, 0.1)},
        "standard",
        [pool],
        [endpoint(in_flight)],
        {},
        0,
        0,
        None,
    )
    return replace(made, **more)


def served(requests: float, bucket: int = 3, **more: Any) -> MetricSample:
    responses = {("200", "served"): requests}
    ttft = {"a:1": {bucket: int(requests)}}
    return mark(
        at=1.0,
        responses=responses,
        ttft=ttft,
        tokens=10 * requests,
        predicted_tokens={"a:1": (100, 50)},
        **more,
    )


async def test_counters_are_summed_and_percentiles_cover_all_observations() -> None:
    both, _ = watch(Stub(served(90, 3), standing(2)), Stub(served(10, 9), standing(3)))
    noted, stands = await both.take_sample(None)
    shown = build_view(stands, SampleHistory(), noted)
    assert noted.responses == {("200", "served"): 100.0}
    assert noted.ttft == {"a:1": {3: 90, 9: 10}}
    assert (noted.tokens, noted.predicted_tokens) == (1000.0, {"a:1": (200, 100)})
    assert shown["totals"]["since_start"]["requests"] == 100
    assert shown["totals"]["waiting"] == 5
    assert shown["pools"][0] == {"name": "main", "in_flight": 5, "waiting": 5, "price": 1.5}


async def test_values_that_every_worker_knows_in_full_are_not_summed() -> None:
    both, _ = watch(
        Stub(mark(in_flight={"a:1": 7}, received={"a:1": 100}), standing(7)),
        Stub(mark(in_flight={"a:1": 6}, received={"a:1": 90}), standing(6)),
    )
    noted, stands = await both.take_sample(None)
    assert (noted.in_flight, noted.received) == ({"a:1": 7}, {"a:1": 100})
    assert [row["in_flight"] for row in stands.endpoints] == [7]


async def test_no_total_falls_when_a_worker_ends_or_does_not_respond() -> None:
    both, serving = watch(Stub(served(90), standing()), Stub(served(10), standing()))
    before, _ = await both.take_sample(None)
    serving[0].lost = True
    silent, _ = await both.take_sample(before)
    serving[:] = [serving[1], Stub(served(1), standing())]
    after, _ = await both.take_sample(silent)
    assert [each.responses for each in (silent, after)] == [
        {("200", "served"): 100.0},
        {("200", "served"): 101.0},
    ]
    assert silent.ttft["a:1"] is before.ttft["a:1"]


async def test_endpoints_that_were_removed_do_not_stay_in_the_sums_of_ended_workers() -> None:
    def named(number: int) -> Stub:
        name = f"pod-{number}"
        counts = {
            "ttft": {name: {3: 1}},
            "tpot": {name: {3: 1}},
            "predicted_tokens": {name: (2, 1)},
        }
        errors, pairs = {(name, "reset"): 1.0}, {(name, name): (1, 0, 9)}
        sample = mark(at=1.0, tokens=1.0, upstream_errors=errors, pairs=pairs, **counts)
        return Stub(sample, standing(endpoints=[endpoint(0, name=name, url=f"http://{name}")]))

    both, serving = watch(named(0))
    for number in range(1, 40):  # every worker is replaced after its endpoint
        sample, _ = await both.take_sample(None)
        serving[:] = [named(number)]
    sample, _ = await both.take_sample(sample)
    assert sample.tokens == 40
    fields = (sample.ttft, sample.tpot, sample.predicted_tokens, sample.upstream_errors)
    assert [len(field) for field in (*fields, sample.pairs)] == [1] * 5


async def test_no_worker_is_an_error() -> None:
    none, _ = watch()
    with pytest.raises(LookupError, match="none of the worker processes answered"):
        await none.take_sample(None)


def test_one_worker_suffices_to_report_an_endpoint_out_and_pairs_are_summed() -> None:
    out = endpoint(
        0, state="ejected", cause="connect_failed", since_s=3.0, available=False, silence_s=0.5
    )
    names = ("p", "d")
    whole = merge_statuses(
        [
            standing(
                pairs={names: PairStatus(3, 1, 0.1, (0.1,) * 30, "tcp")},
                handoffs_in_progress=1,
                active_requests=4,
            ),
            standing(
                endpoints=[out],
                pairs={names: PairStatus(1, 0, 0.5, (0.5,), None)},
                handoffs_in_progress=2,
                active_requests=1,
                config_problem="line 3",
            ),
            standing(pairs={names: PairStatus(0, 0, None, (), None)}),
        ]
    )
    (row,) = whole.endpoints
    assert (row["state"], row["cause"], row["available"], row["silence_s"]) == (
        "ejected",
        "connect_failed",
        False,
        0.5,
    )
    assert whole.pairs == {
        names: PairStatus(4, 1, pytest.approx(0.2), ((0.1,) * 30 + (0.5,)), "tcp")
    }
    assert whole.pairs[names].p95_s == 0.1, "of all handoffs, not the larger percentile"
    assert (whole.handoffs_in_progress, whole.active_requests, whole.config_problem) == (
        3,
        5,
        "line 3",
    )


@pytest.mark.parametrize("oldest", [0, 1, 2])
def test_one_worker_suffices_to_report_an_endpoint_that_takes_requests_slow(oldest: int) -> None:
    slow = endpoint(0, slow="4.1 times as slow as its peers per token")
    statuses = [standing(endpoints=[endpoint(0)]), standing(endpoints=[slow]), standing()]
    (row,) = merge_statuses(statuses[oldest:] + statuses[:oldest]).endpoints
    assert (row["state"], row["available"]) == ("up", True)
    assert row["slow"] == "4.1 times as slow as its peers per token"


def test_an_endpoint_that_is_out_keeps_the_reason_of_the_worker_that_reports_it() -> None:
    out = endpoint(0, state="ejected", cause="connect_failed", available=False)
    slow = endpoint(0, slow="4.1 times as slow as its peers per token")
    for rows in ([out, slow], [slow, out]):
        (row,) = merge_statuses([standing(endpoints=[each]) for each in rows]).endpoints
        assert (row["cause"], row["slow"]) == ("connect_failed", None)


@pytest.mark.parametrize(
    ("state", "more", "severity"),
    [
        ("dead", {}, 5),
        ("ejected", {"cause": "slow", "slow": "4.1 times as slow"}, 5),
        ("up", {"slow": "4.1 times as slow as its peers per token"}, 4),
        ("up", {"silence_s": 3.0}, 4),
        ("returning", {}, 3),
        ("draining", {}, 2),
        ("leaving", {}, 1),
        ("up", {}, 0),
    ],
)
async def test_severity_of_an_endpoint(state: str, more: dict[str, Any], severity: int) -> None:
    both, _ = watch(Stub(served(1), standing(endpoints=[endpoint(0, state=state, **more)])))
    noted, stands = await both.take_sample(None)
    assert build_view(stands, SampleHistory(), noted)["endpoints"][0]["severity"] == severity
