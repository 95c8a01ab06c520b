"""Counters, gauges and histograms that cost a list increment, exposed through prometheus-client.

Lives here: the mechanism. Not here: which metrics there are (metrics.py). prometheus-client's own histograms take a
lock and 2.3 us an observation; a gateway is one thread, so ours keep plain arrays and are read only when scraped.
Owner of all numbers: the event loop's thread. Scraping from another thread may tear a histogram; do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

OTHER = "other"
"""What a label says once it has shown as many values as it may."""


class Label(msgspec.Struct, frozen=True):
    """A label and how many values it may show before the rest become OTHER."""

    name: str
    cap: int = 64


class Spec(msgspec.Struct, frozen=True):
    """What a family is, as its documentation shows it. `buckets` are upper bounds, ascending, +Inf left out."""

    name: str
    kind: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()


class Counter:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount` (>= 0)."""
        self.value += amount


class Gauge:
    """Goes up and down, or follows a function that is asked when scraped."""

    __slots__ = ("_source", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._source: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        """Now it is `value`."""
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount`."""
        self.value += amount

    def follow(self, source: Callable[[], float]) -> None:
        """From now on `source` is asked at each scrape; it must be quick and must not fail."""
        self._source = source

    def read(self) -> float:
        """The value a scrape sees."""
        return self.value if self._source is None else self._source()


class Histogram:
    """Observations in buckets: counts[i] holds those in (bounds[i-1], bounds[i]], the last those above every bound."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts `value`, in the unit of the name (seconds)."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as Prometheus writes it, observations at or below it), +Inf last."""
        total, shown = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self.counts, strict=True):
            total += count
            shown.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return shown


Meter = TypeVar("Meter", Counter, Gauge, Histogram)


class Family(Generic[Meter]):
    """One metric with its labelled children. Resolve a child once, keep it, and observing costs no look-up."""

    __slots__ = ("_make", "_meters", "_seen", "spec")

    def __init__(self, spec: Spec, make: Callable[[], Meter]) -> None:
        self.spec = spec
        self._make: Callable[[], Meter] = make
        self._meters: dict[tuple[str, ...], Meter] = {}
        self._seen: tuple[set[str], ...] = tuple(set() for _ in spec.labels)

    def labels(self, *values: str) -> Meter:
        """The child for these label values, in the order of the spec; made on first use."""
        found = self._meters.get(values)
        return found if found is not None else self._admit(values)

    def forget(self, label: str, value: str) -> None:
        """Drops every child whose `label` is `value`: what a removed endpoint leaves. Its place is free again."""
        place = [each.name for each in self.spec.labels].index(label)
        self._seen[place].discard(value)
        self._meters = {values: meter for values, meter in self._meters.items() if values[place] != value}

    def clear(self) -> None:
        """Drops every child."""
        self._meters = {}
        for seen in self._seen:
            seen.clear()

    def children(self) -> Iterator[tuple[tuple[str, ...], Meter]]:
        """(label values, child), in order of first use."""
        return iter(self._meters.items())

    def _admit(self, values: tuple[str, ...]) -> Meter:
        if len(values) != len(self.spec.labels):
            raise ValueError(f"{self.spec.name} has {len(self.spec.labels)} labels, not {len(values)}")
        capped = tuple(map(self._capped, self.spec.labels, self._seen, values))
        return self._meters.setdefault(capped, self._make())

    @staticmethod
    def _capped(label: Label, seen: set[str], value: str) -> str:
        if value not in seen and len(seen) >= label.cap:
            return OTHER
        seen.add(value)
        return value


class Meters:
    """The families of one process, and what the system knows of the process; no global registry is touched."""

    def __init__(self) -> None:
        self.families: list[Family[Counter] | Family[Gauge] | Family[Histogram]] = []
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(namespace="penstock", registry=self._process)

    def counter(self, name: str, text: str, *labels: Label) -> Family[Counter]:
        """A new family of counters; `name` without the suffix _total is refused, so that both spellings agree."""
        if not name.endswith("_total"):
            raise ValueError(f"counter {name} must end in _total")
        family = Family(Spec(name, "counter", text, labels), Counter)
        self.families.append(family)
        return family

    def gauge(self, name: str, text: str, *labels: Label) -> Family[Gauge]:
        """A new family of gauges."""
        family = Family(Spec(name, "gauge", text, labels), Gauge)
        self.families.append(family)
        return family

    def histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: Label) -> Family[Histogram]:
        """A new family of histograms with ascending upper `bounds`."""
        family = Family(Spec(name, "histogram", text, labels, bounds), lambda: Histogram(bounds))
        self.families.append(family)
        return family

    def render(self) -> bytes:
        """Everything in Prometheus' text format (prometheus_client.CONTENT_TYPE_LATEST)."""
        return b"".join(self.slices())

    def slices(self) -> Iterator[bytes]:
        """As `render`, a family at a time: a server that yields to its loop in between stalls no stream."""
        for family in self.families:
            yield generate_latest(_Page(_exposed(family)))
        yield generate_latest(self._process)


class _Page(Collector):
    """One family as prometheus-client wants to be handed it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _exposed(family: Family[Counter] | Family[Gauge] | Family[Histogram]) -> Metric:
    spec, names = family.spec, [label.name for label in family.spec.labels]
    if spec.kind == "counter":
        shown: Metric = CounterMetricFamily(spec.name, spec.help, labels=names)
    elif spec.kind == "gauge":
        shown = GaugeMetricFamily(spec.name, spec.help, labels=names)
    else:
        shown = HistogramMetricFamily(spec.name, spec.help, labels=names)
    for values, meter in family.children():
        _add(shown, values, meter)
    return shown


def _add(shown: Metric, values: tuple[str, ...], meter: Counter | Gauge | Histogram) -> None:
    if isinstance(shown, HistogramMetricFamily) and isinstance(meter, Histogram):
        shown.add_metric(values, meter.cumulative(), meter.sum)
    elif isinstance(shown, CounterMetricFamily) and isinstance(meter, Counter):
        shown.add_metric(values, meter.value)
    elif isinstance(shown, GaugeMetricFamily) and isinstance(meter, Gauge):
        shown.add_metric(values, meter.read())
