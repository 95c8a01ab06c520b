"""Merges the metrics of all workers into one scrape, with totals that never fall.

A total that falls would look like a counter reset. Therefore the last values of a worker that does
not respond are kept, and so are the counters of workers that have ended. exposition.py writes the
merged metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from operator import add

import msgspec

from gateway.metrics.exposition import render_page
from gateway.metrics.labels import ENDPOINT_LABELS
from gateway.metrics.metric_types import (
    OTHER_VALUES,
    FamilyReading,
    FamilySpec,
    HistogramValue,
    Merge,
    RequestExemplar,
)
from gateway.metrics.runtime_gauges import ENDPOINT_STATE
from gateway.workers.worker_process import REQUEST_ERRORS, Worker

SCRAPE_S = 5.0
PATH = "/metrics/readings"

Readings = Sequence[FamilyReading]
_decoder = msgspec.msgpack.Decoder(list[FamilyReading])


class CounterTotals:
    """The metrics of all worker processes together, whose totals never fall when a worker ends.

    serving  function that returns the workers that serve requests
    ending   function that returns the replaced workers that finish their last requests; of these,
             only counters are used
    """

    def __init__(
        self, serving: Callable[[], Sequence[Worker]], ending: Callable[[], Sequence[Worker]]
    ) -> None:
        self._serving, self._ending = serving, ending
        self._last: dict[Worker, Readings] = {}
        self._ended: Readings = ()
        self._one_at_a_time = asyncio.Lock()

    async def render_page(
        self,
        own: Callable[[Mapping[int, Readings]], Readings] = lambda _: (),
        *,
        exemplars: bool = False,
    ) -> bytes:
        """Return the text of a metrics scrape, including the supervisor's own metrics.

        `own` is a function that returns the supervisor's metric families; it is called with the
        families of each serving worker by its number. Concurrent scrapes run one after the other.
        """
        async with self._one_at_a_time:
            workers = [*self._serving(), *self._ending()]
            answers = await asyncio.gather(
                *(_scrape(worker, exemplars=exemplars) for worker in workers)
            )
            fresh = {
                worker: families
                for worker, families in zip(workers, answers, strict=True)
                if families is not None
            }
            self._last |= fresh
            serving = self._serving()
            ended = [
                self._last.pop(worker) for worker in self._last.keys() - {*serving, *self._ending()}
            ]
            if ended:
                self._ended = await asyncio.to_thread(
                    _merge_ended, [self._ended, *ended], [*fresh.values()]
                )
            now = [fresh[worker] for worker in serving if worker in fresh]
            mine = own({worker.number: fresh[worker] for worker in serving if worker in fresh})
            counters_only = [
                families
                for worker, families in self._last.items()
                if worker not in serving or worker not in fresh
            ]
            return await asyncio.to_thread(
                _render, [*now, mine], [self._ended, *counters_only], exemplars
            )


def _merge_ended(ended: Sequence[Readings], fresh: Sequence[Readings]) -> Readings:
    total = merge_families((), ended)
    return without_removed_endpoints(total, fresh)


def _render(now: Sequence[Readings], ended: Sequence[Readings], exemplars: bool) -> bytes:
    return render_page(merge_families(now, ended), exemplars=exemplars)


async def _scrape(worker: Worker, *, exemplars: bool) -> Readings | None:
    try:
        response = await worker.request(
            "GET", f"{PATH}?exemplars" if exemplars else PATH, timeout_s=SCRAPE_S
        )
        return _decoder.decode(response.body) if response.status == 200 else None
    except (*REQUEST_ERRORS, msgspec.DecodeError):
        return None


def merge_families(
    pages: Iterable[Iterable[FamilyReading]], ended: Iterable[Iterable[FamilyReading]] = ()
) -> list[FamilyReading]:
    """Merge the metric families of several workers by name.

    Counters and histograms are summed. Gauges are combined as their specification says; gauges of
    `ended` workers are left out.
    """
    merged: dict[str, FamilyReading] = {}
    without_gauges = (reading for page in ended for reading in page if reading.spec.kind != "gauge")
    for reading in chain(chain.from_iterable(pages), without_gauges):
        existing = merged.get(reading.spec.name)
        if existing is None:
            merged[reading.spec.name] = FamilyReading(reading.spec, reading.values.copy())
        elif existing.spec.buckets == reading.spec.buckets:
            _add(existing, reading)
    return list(merged.values())


def without_removed_endpoints(
    readings: Iterable[FamilyReading], pages: Sequence[Iterable[FamilyReading]]
) -> list[FamilyReading]:
    """Return the readings without the series of endpoints that no worker has any more.

    readings  the metric families of ended workers
    pages     the families of all workers that respond; if none does, nothing is left out

    A process drops these series when a reload removes an endpoint. Without this function, the
    series of ended workers would stay for weeks, as long as the supervisor runs.
    """
    known = {
        value
        for page in pages
        for reading in page
        if reading.spec.name == ENDPOINT_STATE
        for value in _endpoints_of(reading.spec, reading.values)
    }
    if not known:
        return list(readings)
    known.add(OTHER_VALUES)
    return [
        FamilyReading(
            reading.spec,
            {
                labels: value
                for labels, value in reading.values.items()
                if known.issuperset(_endpoints_of(reading.spec, (labels,)))
            },
        )
        for reading in readings
    ]


def _endpoints_of(spec: FamilySpec, series: Iterable[tuple[str, ...]]) -> Iterator[str]:
    # Yield the names of endpoints among the series' label values.
    indexes = [at for at, label in enumerate(spec.labels) if label in ENDPOINT_LABELS]
    return (labels[at] for labels in series for at in indexes)


def _add(merged: FamilyReading, other: FamilyReading) -> None:
    for labels, value in other.values.items():
        before = merged.values.get(labels)
        if before is None:
            merged.values[labels] = value
        elif isinstance(before, HistogramValue) and isinstance(value, HistogramValue):
            merged.values[labels] = _sum_histograms(before, value)
        elif not isinstance(before, HistogramValue) and not isinstance(value, HistogramValue):
            merged.values[labels] = _merge_gauge(merged.spec.merge, before, value)


def _sum_histograms(first: HistogramValue, second: HistogramValue) -> HistogramValue:
    # Return the sum of two histograms; each bucket keeps the newer exemplar.
    counts = list(map(add, first.counts, second.counts))
    marks = [
        max(filter(None, pair), key=_time, default=None)
        for pair in zip_longest(first.exemplars, second.exemplars)
    ]
    return HistogramValue(counts, first.sum + second.sum, marks)


def _time(mark: RequestExemplar) -> float:
    return mark[1]


def _merge_gauge(rule: Merge, first: float, second: float) -> float:
    match rule:
        case Merge.SUM:
            return first + second
        case Merge.MAX:
            return max(first, second)
        case Merge.MIN:
            return min(first, second)
        case Merge.LAST:
            return second
