"""Counters, gauges and histograms that cost a list increment.

Lives here: the mechanism. Not here: which metrics there are (metrics.py) and the text of a scrape (exposition.py).
prometheus-client's own histograms take a lock and 2.3 us an observation; a gateway is one thread, so ours keep plain
arrays and are read only when scraped.
Owner of all numbers: the event loop's thread. Scraping from another thread may tear a histogram; do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from math import ceil, log
from time import monotonic, time
from typing import Generic, TypeVar

import msgspec
from prometheus_client import Metric
from prometheus_client.process_collector import ProcessCollector

from gateway.sketch import LEAST, MOST, PER_LOG

OTHER = "other"
"""What a label says once it has shown as many values as it may."""


class Label(msgspec.Struct, frozen=True):
    """A label and how many values it may show before the rest become OTHER."""

    name: str
    cap: int = 64


class Merge(StrEnum):
    """How the same series of several processes become one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


POOL = "pool"
TELL_POOLS = ("endpoint", "prefill", "model")
"""Labels whose values belong to one pool each, the most certain first."""

Pools = Mapping[tuple[str, str], str]
"""The pool by label and value."""

UNITS = ("seconds", "bytes", "tokens", "ratio")

Mark = tuple[float, float, str, str]
"""An exemplar: the value, its time (monotonic seconds), the request's id, its trace's id or ""."""


class Spec(msgspec.Struct, frozen=True):
    """What a family is: its documentation, its place on a board and its merging are made from this.

    buckets   upper bounds, ascending, +Inf left out
    owner     the module that changes it          row     of the boards that it belongs to
    marked    its buckets remember one request each, and quantiles can be read from its sketch
    """

    name: str
    kind: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    owner: str = ""
    row: str = ""
    merge: Merge = Merge.SUM
    marked: bool = False

    @property
    def pool_of(self) -> str | None:
        """The label whose value tells the pool, which is then one more label of a scrape; None: no such label."""
        names = [label.name for label in self.labels]
        return None if POOL in names else next((name for name in TELL_POOLS if name in names), None)

    @property
    def exposed(self) -> tuple[str, ...]:
        """The names of the labels that a scrape shows."""
        names = tuple(label.name for label in self.labels)
        return names if self.pool_of is None else (*names, POOL)

    @property
    def unit(self) -> str:
        """The base unit that its name ends in; "" for what is merely counted."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""


class Buckets(msgspec.Struct, frozen=True, array_like=True):
    """What a histogram has counted: observations by bucket (not cumulative) and their sum.

    marks   the newest request of each bucket, its time in Unix seconds; empty unless asked for
    """

    counts: list[int]
    sum: float
    marks: list[Mark | None] = []


Values = dict[tuple[str, ...], float | Buckets]


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """A family at one moment: its values by label values, in the order of `spec.exposed`."""

    spec: Spec
    values: Values


class Counter:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount` (>= 0)."""
        self.value += amount

    def read(self) -> float:
        """The value that a scrape sees."""
        return self.value


class Gauge:
    """Goes up and down, or follows a function that is asked when scraped."""

    __slots__ = ("_source", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._source: Callable[[], float | None] | None = None

    def set(self, value: float) -> None:
        """Now it is `value`."""
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount`."""
        self.value += amount

    def follow(self, source: Callable[[], float | None]) -> None:
        """From now on `source` is asked at each scrape; it must be quick and must not fail. None: nothing to show."""
        self._source = source

    def read(self) -> float | None:
        """The value a scrape sees."""
        return self.value if self._source is None else self._source()


class Histogram:
    """Observations in buckets: counts[i] holds those in (bounds[i-1], bounds[i]], the last those above every bound.

    `marks` has the newest request of each bucket, which is all that exemplars ever cost. `sketch`
    counts the same values in finer buckets (sketch.py), from which quantiles are read; filled by mark().
    """

    __slots__ = ("_bounds", "counts", "marks", "sketch", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.marks: list[Mark | None] = []
        self.sketch: defaultdict[int, int] = defaultdict(int)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts `value`, in the unit of the name (seconds)."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def mark(self, mark: Mark) -> None:
        """Counts the mark's value, and remembers it as the newest in its bucket."""
        value = mark[0]
        at = bisect_left(self._bounds, value)
        self.counts[at] += 1
        self.sum += value
        inside = LEAST if value < LEAST else value if value < MOST else MOST
        self.sketch[ceil(log(inside) * PER_LOG)] += 1
        if not self.marks:
            self.marks = [None] * len(self.counts)
        self.marks[at] = mark

    def buckets(self, zero: float | None = None) -> Buckets:
        """What it has counted so far. With `zero`, the Unix time at which the monotonic clock began, each bucket comes
        with its newest request."""
        marks = [] if zero is None else [mark and _at_unix_time(mark, zero) for mark in self.marks]
        return Buckets(self.counts.copy(), self.sum, marks)


def _at_unix_time(mark: Mark, zero: float) -> Mark:
    value, at, request_id, trace_id = mark
    return value, round(zero + at, 3), request_id, trace_id


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


AnyFamily = Family[Counter] | Family[Gauge] | Family[Histogram]


class Section:
    """Where families are made: those of one owner and one row of the boards."""

    __slots__ = ("_families", "_owner", "_row")

    def __init__(self, families: list[AnyFamily], row: str, owner: str) -> None:
        self._families = families
        self._row = row
        self._owner = owner

    def counter(self, name: str, text: str, *labels: Label) -> Family[Counter]:
        """A new family of counters; `name` without the suffix _total is refused, so that both spellings agree."""
        if not name.endswith("_total"):
            raise ValueError(f"counter {name} must end in _total")
        family = Family(self._spec(name, "counter", text, labels), Counter)
        self._families.append(family)
        return family

    def gauge(self, name: str, text: str, *labels: Label, merge: Merge = Merge.SUM) -> Family[Gauge]:
        """A new family of gauges. What several processes each have a part of is summed; all else says its `merge`."""
        family = Family(msgspec.structs.replace(self._spec(name, "gauge", text, labels), merge=merge), Gauge)
        self._families.append(family)
        return family

    def histogram(
        self, name: str, text: str, bounds: tuple[float, ...], *labels: Label, marked: bool = False
    ) -> Family[Histogram]:
        """A new family of histograms with ascending upper `bounds`; one that is `marked` shows exemplars."""
        spec = msgspec.structs.replace(self._spec(name, "histogram", text, labels), buckets=bounds, marked=marked)
        family = Family(spec, lambda: Histogram(bounds))
        self._families.append(family)
        return family

    def _spec(self, name: str, kind: str, text: str, labels: tuple[Label, ...]) -> Spec:
        return Spec(name, kind, text, labels, owner=self._owner, row=self._row)


class Meters:
    """The families of one process, and what the system knows of the process; no global registry is touched."""

    def __init__(self) -> None:
        self.families: list[AnyFamily] = []
        self._process = ProcessCollector(registry=None)

    def section(self, row: str, owner: str) -> Section:
        """Makes families that `owner` (a module's path below gateway/) changes and that stand in this row."""
        return Section(self.families, row, owner)

    def readings(self, pools: Pools, *, exemplars: bool = False) -> Iterator[Reading]:
        """What each family has counted, and the standard `process_*` metrics; buckets with their newest requests if
        `exemplars` is set."""
        zero = time() - monotonic() if exemplars else None
        for family in self.families:
            values = _values(family, zero)
            yield Reading(
                family.spec, values if family.spec.pool_of is None else _with_pools(family.spec, values, pools)
            )
        yield from map(_of_process, self._process.collect())


def _with_pools(spec: Spec, values: Values, pools: Pools) -> Values:
    """Each series with the pool of its endpoint or model; "" where it has none, which is as if there was no label."""
    names = [label.name for label in spec.labels]
    at = names.index(spec.pool_of or "")
    return {(*labels, pools.get((names[at], labels[at]), "")): value for labels, value in values.items()}


def _values(family: AnyFamily, zero: float | None) -> Values:
    found: Values = {}
    for values, meter in family.children():
        value = meter.buckets(zero if family.spec.marked else None) if isinstance(meter, Histogram) else meter.read()
        if value is not None:
            found[values] = value
    return found


def _of_process(metric: Metric) -> Reading:
    """A metric of prometheus-client's collector. The group of processes started when its first process did."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    merge = Merge.MIN if metric.name == "process_start_time_seconds" else Merge.SUM
    return Reading(Spec(name, metric.type, metric.documentation, merge=merge), {(): metric.samples[0].value})
