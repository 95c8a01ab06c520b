"""Tests that no total of the workers' metrics falls when a worker ends or does not respond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from gateway.metrics.labels import ENDPOINT, KIND
from gateway.metrics.metric_types import OTHER_VALUES, FamilyReading, FamilySpec, HistogramValue
from gateway.metrics.runtime_gauges import ENDPOINT_STATE, STATE
from gateway.workers.metrics_merge import CounterTotals
from gateway.workers.worker_process import Worker, WorkerResponse

SERVED = FamilySpec("served_total", "counter", "help")
LAG = FamilySpec("lag_seconds", "histogram", "help", has_exemplars=True)
OPEN = FamilySpec("open", "gauge", "help")
ERRORS = FamilySpec("errors_total", "counter", "help", (ENDPOINT, KIND))
STATES = FamilySpec(ENDPOINT_STATE, "gauge", "help", (ENDPOINT, STATE))


class Stub:
    def __init__(self, count: int) -> None:
        self.count: int | None = count
        self.body: bytes | None = None
        self.number = count

    async def request(self, method: str, path: str, timeout_s: float) -> WorkerResponse:
        assert (method, path.partition("?")[0]) == ("GET", "/metrics/readings")
        if self.count is None:
            raise TimeoutError
        marks = [(0.1, 5.0, f"request-{self.count}", "")] if path.endswith("?exemplars") else []
        lag = HistogramValue([self.count], 0.0, marks)  # type: ignore[arg-type]
        page = [
            FamilyReading(SERVED, {(): self.count}),
            FamilyReading(LAG, {(): lag}),
            FamilyReading(OPEN, {(): self.count}),
        ]
        return WorkerResponse(
            200, {}, msgspec.msgpack.encode(page) if self.body is None else self.body
        )


def counted(serving: list[Stub], ending: list[Stub]) -> CounterTotals:
    return CounterTotals(
        lambda: cast("list[Worker]", list(serving)), lambda: cast("list[Worker]", list(ending))
    )


async def test_process_metrics_of_the_supervisor_are_summed_with_those_of_workers() -> None:
    own = [
        FamilyReading(OPEN, {(): 2.0}),
        FamilyReading(FamilySpec("mine", "gauge", "help"), {(): 1.0}),
    ]
    page = (await counted([Stub(5), Stub(7)], []).render_page(lambda _: own)).decode()
    assert "open 14.0\n" in page
    assert "mine 1.0\n" in page


async def test_the_supervisor_gets_the_families_of_each_worker_that_responds() -> None:
    silent = Stub(3)
    silent.count = None
    seen: list[Mapping[int, Sequence[FamilyReading]]] = []

    def own(workers: Mapping[int, Sequence[FamilyReading]]) -> list[FamilyReading]:
        seen.append(workers)
        return []

    await counted([Stub(5), silent, Stub(7)], [Stub(9)]).render_page(own)
    assert [
        {number: page[0].values[()] for number, page in workers.items()} for workers in seen
    ] == [{5: 5, 7: 7}]


async def test_an_openmetrics_scrape_has_exemplars_of_workers() -> None:
    workers = counted([Stub(5), Stub(7)], [])
    page = (await workers.render_page(exemplars=True)).decode()
    assert 'lag_seconds_bucket{le="+Inf"} 12.0 # {request_id="request-5"} 0.1 5.0\n' in page
    assert page.endswith("# EOF\n")
    assert b"request-5" not in await workers.render_page()


async def test_a_worker_with_an_invalid_response_counts_as_unresponsive() -> None:
    workers = [Stub(5), Stub(7)]
    workers[1].body = b"no readings"
    assert b"served_total 5.0\n" in await counted(workers, []).render_page()


async def test_counters_of_unresponsive_ending_and_ended_workers_still_count() -> None:
    serving, ending = [Stub(5), Stub(7)], [Stub(0)][:0]
    workers = counted(serving, ending)

    async def says(count: int, now_open: int) -> None:
        page = (await workers.render_page()).decode()
        assert f"served_total {count}.0\n" in page
        assert f"lag_seconds_count {count}.0\n" in page
        assert f"open {now_open}.0\n" in page

    await says(12, 12)
    serving[1].count = None
    await says(12, 5)
    serving[1].count = 8
    await says(13, 13)
    ending.append(serving.pop())
    serving.append(Stub(1))
    ending[0].count = 9
    await says(15, 6)
    ending.clear()
    await says(15, 6)
    serving[0].count = 6
    del serving[1]
    await says(16, 6)
    await says(16, 6)


async def test_series_of_removed_endpoints_do_not_stay_in_the_sums_of_ended_workers() -> None:
    def named(number: int, count: int) -> Stub:
        name, worker = f"pod-{number}", Stub(count)
        page = [
            FamilyReading(SERVED, {(): count}),
            FamilyReading(STATES, {(name, "up"): 1.0}),
            FamilyReading(ERRORS, {(name, "reset"): 1.0, (OTHER_VALUES, "reset"): 1.0}),
        ]
        worker.body = msgspec.msgpack.encode(page)
        return worker

    serving = [named(0, 1)]
    workers = counted(serving, [])
    for number in range(1, 40):  # every worker is replaced after its endpoint
        await workers.render_page()
        serving[:] = [named(number, 1)]
    lines = (await workers.render_page()).decode().splitlines()
    assert "served_total 40.0" in lines
    assert sorted(line for line in lines if line.startswith("errors_total")) == [
        'errors_total{endpoint="other",kind="reset"} 40.0',
        'errors_total{endpoint="pod-39",kind="reset"} 1.0',
    ]
