"""Tests that dashboards and rules use only metrics and labels that a running gateway has.

The gateway has served mixed traffic. Generated panels are not checked.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from gateway.config import SizedFor
from gateway.telemetry.drift_records import ShapeRecord
from policies.sizing.workload_drift import BINS
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.duration_limits import PATIENCE_S
from tests.e2e.split_fleet import SENTENCE, SplitFleet, split_fleet
from tools.monitoring import rules
from tools.monitoring.dashboards import BOARDS, family_name
from tools.monitoring.files import queries
from tools.monitoring.promql import find_selectors, grouping_labels

GIVEN = frozenset({"instance", "job", "namespace"})
"""Labels that Prometheus adds to every series."""

WITHOUT_CHILDREN = {
    "penstock_split_leases_given_up_total": "no client disconnects between the legs",
    "penstock_tls_certificate_not_after_timestamp_seconds": "no listener with TLS",
}
"""Families of handwritten queries that have no series under this traffic, so that only their names
are checked.
"""

Seen = dict[str, set[str]]


def record_series(page: str, seen: Seen) -> None:
    # Add the names and labels of a metrics page to `seen`.
    #
    # A metric family without series has no labels.
    for family in text_string_to_metric_families(page):
        seen[family.name + ("_total" if family.type == "counter" else "")] |= set()
        for sample in family.samples:
            seen[sample.name] |= set(sample.labels)


async def scrape(fleet: GatewayFleet | SplitFleet, seen: Seen) -> None:
    async with fleet.http.get(fleet.app.admin_url + "/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        record_series(await answer.text(), seen)


async def cause_every_event(fleet: GatewayFleet) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not fleet.metric("penstock_queue_seconds_count"):
            await asyncio.gather(*(fleet.ask(tokens=64) for _ in range(6)))
    for _ in range(34):
        last = await fleet.ask()
    preferred = next(
        group for group in fleet.groups if group.url.endswith(last.headers["x-penstock-endpoint"])
    )
    preferred.faults.apply("5xx")
    for _ in range(8):
        await fleet.ask(stream=False)
    async with asyncio.timeout(PATIENCE_S):
        # The last request may have gone to the other endpoint.
        while not fleet.metric("penstock_upstream_errors_total"):
            await asyncio.gather(*(fleet.ask(stream=False) for _ in range(2)))
    for member in fleet.groups:
        member.faults.apply("stall")
    waiting = [asyncio.create_task(fleet.ask()) for _ in range(8)]
    async with asyncio.timeout(PATIENCE_S):
        while not fleet.metric("penstock_shed_total"):
            await asyncio.sleep(0.005)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with fleet.http.put(fleet.app.admin_url + "/config", data="version: 2") as answer:
        assert answer.status == 400
    async with asyncio.timeout(PATIENCE_S):
        while not fleet.metric("penstock_client_disconnects_total"):
            await asyncio.sleep(0.005)


def watch_a_window_of_drift(fleet: GatewayFleet) -> None:
    monitor, config = fleet.app.drift, fleet.app.config
    assert monitor is not None
    pool = next(iter(config.pools))
    bins = {name: [1.0] + [0.0] * (count - 1) for name, count in BINS.items()}
    sized_for = SizedFor.model_validate(bins | {"hourly_rates": [1.0] * 24})
    monitor.configure(config.model_copy(update={"sized_for": {pool: sized_for}}), 0.0)
    monitor.feed(ShapeRecord(pool, float(n), 100, 10, 0, ()) for n in range(601))


async def test_every_series_of_a_query_is_in_a_scrape() -> None:
    seen: Seen = defaultdict(set)
    queue = {"waiting_room": {"size": 2, "timeout": "10s"}, "policy": "prefix_aware"}
    async with gateway_fleet(2, concurrency=2, pool=queue) as fleet:
        await cause_every_event(fleet)
        watch_a_window_of_drift(fleet)
        # The mirror sets this gauge after its first block of copies.
        fleet.app.metrics.mirror_metrics.worse.labels("engines").set(0.0)
        # A configuration with the section `batch` sets this gauge.
        fleet.app.metrics.batches.labels("behind").set(0.0)
        await scrape(fleet, seen)
    async with split_fleet("vllm_nixl", groups=(1, 1)) as halves:
        await halves.assert_right_answer({"prompt": SENTENCE * 30, "max_tokens": 8, "stream": True})
        await scrape(halves, seen)
    seen["up"] = set()
    for name in rules.recorded_names():
        seen[name] = {"slo", "pool", "model"}
    for where, query in queries().items():
        names = {selector.name for selector in find_selectors(query)}
        families = (
            names if query in handwritten_queries() else {family_name(name) for name in names}
        )
        assert families <= seen.keys(), f"{where}: {families - seen.keys()} in no scrape"
        excused = (
            WITHOUT_CHILDREN.keys()
            if query in handwritten_queries()
            else {name for name in names if not seen.get(name)}
        )
        for each in find_selectors(query):
            if each.name not in excused:
                assert each.labels <= seen[each.name] | GIVEN, (
                    f"{where}: {each.labels - seen[each.name]}"
                )
        if not names & excused:
            assert grouping_labels(query) <= set().union(*(seen[name] for name in names)) | GIVEN, (
                where
            )
    for name in WITHOUT_CHILDREN:
        assert not seen[name], f"{name} has children now: remove its exemption"


def handwritten_queries() -> set[str]:
    # Return the handwritten queries of dashboards and rules.
    #
    # All other queries are generated from the catalogue, and the events that they count may not
    # have occurred yet.
    panels = (panel for board in BOARDS for row in board.rows.values() for panel in row)
    return {*rules.queries().values(), *(query.expr for panel in panels for query in panel.queries)}
