"""Counters, gauges and histograms whose update costs little more than incrementing a list element.

The histograms of prometheus-client take a lock and 2.3 us per observation. A gateway runs in one
thread, so these metrics use plain lists without a lock. Only the event loop's thread may read and
update them. catalogue.py declares the metrics, and exposition.py writes the text of a scrape. No
I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from math import log
from typing import Generic, TypeVar

import msgspec

from gateway.metrics.quantile_sketch import MAX_VALUE, MIN_VALUE, PER_LOG
from gateway.util.work_in_turns import WorkMeter, slices

MAX_NEW = 64
"""Maximum number of observed values of a histogram that have not been counted in their buckets."""

OTHER_VALUES = "other"
"""The label value that stands for all further values when a label has reached its maximum number of
values.
"""


class Label(msgspec.Struct, frozen=True):
    """A metric label. The number of its different values is limited, because each takes memory.

    After `max_values` different values, all further ones share one series, whose label value is
    OTHER_VALUES.
    """

    name: str
    max_values: int = 64


class Merge(StrEnum):
    """How the values of one metric series from several worker processes are combined.

    SUM   the sum of all values
    MAX   the largest value
    MIN   the smallest value
    LAST  the value of one worker
    """

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


POOL = "pool"
POOL_LABELS = ("endpoint", "prefill", "model")
"""Labels from which the pool of a series can be derived, the most reliable label first."""

PoolByLabel = Mapping[tuple[str, str], str]
"""The name of the pool for each pair (label, label value)."""

UNITS = ("seconds", "bytes", "tokens", "ratio")

RequestExemplar = tuple[float, float, str, str]
"""An exemplar: a value in seconds, its time in monotonic seconds, the request id, and the trace id
or "".
"""


class FamilySpec(msgspec.Struct, frozen=True):
    """The specification of a metric family: its name, type, labels and help text.

    The family's documentation, its dashboard panel and the merging of its values follow from it.

    buckets        upper bounds of a histogram's buckets, ascending, without +Inf
    owner          the module that updates the metric
    row            the dashboard row that shows the metric
    has_exemplars  whether each bucket stores its newest request as an exemplar, and a quantile
                   sketch counts the same values
    """

    name: str
    kind: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    owner: str = ""
    row: str = ""
    merge: Merge = Merge.SUM
    has_exemplars: bool = False

    @property
    def pool_label(self) -> str | None:
        """Return the label, such as endpoint, whose value determines the pool of a series.

        Returns None if the metric has the label `pool` itself, or no label that determines it.
        """
        names = [label.name for label in self.labels]
        if POOL in names:
            return None
        return next((name for name in POOL_LABELS if name in names), None)

    @property
    def exposed_labels(self) -> tuple[str, ...]:
        """Return the names of the metric's labels in a scrape, which adds the label `pool`."""
        names = tuple(label.name for label in self.labels)
        return names if self.pool_label is None else (*names, POOL)

    @property
    def unit(self) -> str:
        """Return the unit at the end of the metric's name, such as seconds; "" for plain counts."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""


class HistogramValue(msgspec.Struct, frozen=True, array_like=True):
    """The value of a histogram: the number of observations in each bucket, and their sum.

    Counts are not cumulative.

    exemplars  the newest request of each bucket, with its Unix time; empty unless requested
    """

    counts: list[int]
    sum: float
    exemplars: list[RequestExemplar | None] = []


SeriesValues = dict[tuple[str, ...], float | HistogramValue]


class FamilyReading(msgspec.Struct, frozen=True, array_like=True):
    """The values of a metric family at one moment. Series are keyed by their label values."""

    spec: FamilySpec
    values: SeriesValues


class Counter:
    """A metric whose value only increases, such as a number of requests."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Increase the counter by `amount`, which must not be negative."""
        self.value += amount

    def read(self) -> float:
        return self.value


class Gauge:
    """A metric value that may rise and fall; it may also be computed at each scrape."""

    __slots__ = ("_function", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._function: Callable[[], float | None] | None = None

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set_function(self, function: Callable[[], float | None]) -> None:
        """Compute the gauge's value by calling `function` at each scrape.

        The function must be fast and must not raise an exception. While it returns None, the series
        is left out of scrapes.
        """
        self._function = function

    def read(self) -> float | None:
        """Return the metric's value for a scrape, or None if there is nothing to expose."""
        return self.value if self._function is None else self._function()


class Histogram:
    """Counts values in buckets.

    counts[i] is the number of values v with bounds[i-1] < v <= bounds[i]. The last count is the
    number of values above the last bound.

    sum        the sum of all values
    exemplars  the newest request of each bucket
    sketch     a quantile sketch of the same values (quantile_sketch.py); only observe_request()
               updates it
    """

    __slots__ = (
        *("_bounds", "_bucket", "_counts", "_edges", "_high", "_low", "_new", "_sum"),
        *("exemplars", "sketch"),
    )

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # Edges of the buckets that have exemplars, within the range of a sketch.
        self._edges = (MIN_VALUE, *bounds, MAX_VALUE)
        # The bucket of the last exemplar, whose edges the next value often lies between.
        self._bucket, self._low, self._high = 0, MAX_VALUE, MIN_VALUE
        self._counts = [0] * (len(bounds) + 1)
        self._new: list[float] = []  # values of observe() that have not been counted
        self._sum = 0.0
        self.exemplars: list[RequestExemplar | None] = []
        self.sketch: defaultdict[int, int] = defaultdict(int)

    @property
    def counts(self) -> list[int]:
        self._count_new()
        return self._counts

    @property
    def sum(self) -> float:
        self._count_new()
        return self._sum

    def observe(self, value: float) -> None:
        """Count `value` in its bucket; its unit is in the metric's name, such as seconds."""
        # Counting many values at once takes a third of the time.
        self._new.append(value)
        if len(self._new) >= MAX_NEW:
            self._count_new()

    def observe_request(self, mark: RequestExemplar) -> None:
        """Count the value of one request, and store the request as the exemplar of its bucket.

        `mark` has the value, and the ids of the request and its trace. The request replaces the
        bucket's older exemplar.
        """
        value: float = mark[0]
        self._sum += value
        if not self._low < value <= self._high:
            value = self._find_bucket(value)
        index = self._bucket
        self._counts[index] += 1
        self.sketch[(log(value) * PER_LOG).__ceil__()] += 1  # half the time of math.ceil()
        self.exemplars[index] = mark

    def _find_bucket(self, value: float) -> float:
        # Set the bucket of a value. Return the value, or the nearest one that a sketch can count.
        if not self.exemplars:
            self.exemplars = [None] * len(self._counts)
        index = self._bucket = bisect_left(self._bounds, value)
        low = self._low = self._edges[index]
        high = self._high = self._edges[index + 1]
        return low if value < low else value if value < high else high

    def _count_new(self) -> None:
        # Count the values of observe() that have not been counted.
        values, counts, start = self._new, self._counts, 0
        if not values:
            return
        self._new = []
        self._sum = sum(values, self._sum)
        values.sort()
        for index, bound in enumerate(self._bounds):
            end = bisect_right(values, bound, start)
            counts[index] += end - start
            start = end
            if start == len(values):
                break
        counts[-1] += len(values) - start

    def snapshot(self, unix_offset: float | None = None) -> HistogramValue:
        """Return the current value of the histogram, with exemplars if `unix_offset` is given.

        unix_offset  Unix time minus monotonic time in seconds, to convert the exemplars' times
        """
        marks: list[RequestExemplar | None] = []
        if unix_offset is not None:
            marks = [mark and _at_unix_time(mark, unix_offset) for mark in self.exemplars]
        return HistogramValue(self.counts.copy(), self.sum, marks)


def _at_unix_time(mark: RequestExemplar, unix_offset: float) -> RequestExemplar:
    value, observed_at, request_id, trace_id = mark
    return value, round(unix_offset + observed_at, 3), request_id, trace_id


MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class MetricFamily(Generic[MetricT]):
    """One metric, with one value object per combination of label values (its children).

    A child is a Counter, Gauge or Histogram. Callers should look up a child once and keep it,
    because the lookup takes longer than an update.
    """

    __slots__ = ("_children", "_create", "_label_values", "spec")

    def __init__(self, spec: FamilySpec, create: Callable[[], MetricT]) -> None:
        self.spec = spec
        self._create: Callable[[], MetricT] = create
        self._children: dict[tuple[str, ...], MetricT] = {}
        self._label_values: tuple[set[str], ...] = tuple(set() for _ in spec.labels)

    def labels(self, *values: str) -> MetricT:
        """Return the child for these label values, in the order of the specification's labels.

        The child is created at the first call.
        """
        child = self._children.get(values)
        return child if child is not None else self._add(values)

    def remove_children(self, label: str, *values: str) -> None:
        """Remove every child whose `label` has one of these values.

        The values then no longer count against the label's maximum.
        """
        index = [spec_label.name for spec_label in self.spec.labels].index(label)
        gone = frozenset(values)
        self._label_values[index].difference_update(gone)
        self._children = {
            names: child for names, child in self._children.items() if names[index] not in gone
        }

    def clear(self) -> None:
        """Remove all children, that is, all series of the metric."""
        self._children = {}
        for values in self._label_values:
            values.clear()

    @property
    def child_count(self) -> int:
        return len(self._children)

    def children(self) -> Iterator[tuple[tuple[str, ...], MetricT]]:
        """Yield each value object with its label values, in order of creation."""
        return iter(self._children.items())

    def _add(self, values: tuple[str, ...]) -> MetricT:
        if len(values) != len(self.spec.labels):
            raise ValueError(
                f"metric {self.spec.name} needs values for {len(self.spec.labels)} labels, but "
                f"{len(values)} were given"
            )
        capped = tuple(map(self._capped, self.spec.labels, self._label_values, values))
        return self._children.setdefault(capped, self._create())

    @staticmethod
    def _capped(label: Label, known: set[str], value: str) -> str:
        if value not in known and len(known) >= label.max_values:
            return OTHER_VALUES
        known.add(value)
        return value


AnyFamily = MetricFamily[Counter] | MetricFamily[Gauge] | MetricFamily[Histogram]


class FamilyFactory:
    """Creates the metric families that one module updates, and that one dashboard row shows."""

    __slots__ = ("_families", "_owner", "_row")

    def __init__(self, families: list[AnyFamily], row: str, owner: str) -> None:
        self._families = families
        self._row = row
        self._owner = owner

    def counter(self, name: str, text: str, *labels: Label) -> MetricFamily[Counter]:
        """Create a family of counters. Raises ValueError unless its name ends in _total.

        With this suffix, the name is the same in Prometheus' format and in OpenMetrics.
        """
        if not name.endswith("_total"):
            raise ValueError(f"the name of the counter {name} must end in _total")
        family = MetricFamily(self._spec(name, "counter", text, labels), Counter)
        self._families.append(family)
        return family

    def gauge(
        self, name: str, text: str, *labels: Label, merge: Merge = Merge.SUM
    ) -> MetricFamily[Gauge]:
        """Create a family of gauges.

        text   the help text
        merge  how the values of several worker processes are combined
        """
        spec = msgspec.structs.replace(self._spec(name, "gauge", text, labels), merge=merge)
        family = MetricFamily(spec, Gauge)
        self._families.append(family)
        return family

    def histogram(
        self,
        name: str,
        text: str,
        bounds: tuple[float, ...],
        *labels: Label,
        has_exemplars: bool = False,
    ) -> MetricFamily[Histogram]:
        """Create a family of histograms.

        text           the help text
        bounds         ascending upper bounds of the buckets, in the unit of the metric's name
        has_exemplars  whether each bucket stores its newest request
        """
        spec = self._spec(name, "histogram", text, labels)
        spec = msgspec.structs.replace(spec, buckets=bounds, has_exemplars=has_exemplars)
        family = MetricFamily(spec, lambda: Histogram(bounds))
        self._families.append(family)
        return family

    def _spec(self, name: str, kind: str, text: str, labels: tuple[Label, ...]) -> FamilySpec:
        return FamilySpec(name, kind, text, labels, owner=self._owner, row=self._row)


class MetricRegistry:
    """The metric families of one process. Each gateway process creates its own registry."""

    def __init__(self) -> None:
        self.families: list[AnyFamily] = []

    def section(self, row: str, owner: str) -> FamilyFactory:
        return FamilyFactory(self.families, row, owner)

    def collect(
        self, pools: PoolByLabel, unix_offset: float | None = None
    ) -> Iterator[FamilyReading]:
        """Yield the current values of each metric family.

        pools        the pool of each endpoint and model, for the label `pool`
        unix_offset  Unix time minus monotonic time in seconds; None leaves exemplars out
        """
        return filter(None, self.collect_in_parts(pools, unix_offset))

    def collect_in_parts(
        self, pools: PoolByLabel, unix_offset: float | None = None
    ) -> Iterator[FamilyReading | None]:
        """Like collect(), but also yield None wherever the caller may do other work."""
        meter = WorkMeter()
        for family in self.families:
            values: SeriesValues = {}
            add_pool = _pool_adder(family.spec, pools)
            for part in slices(tuple(family.children())):
                values.update(_values(part, family.spec, unix_offset, add_pool))
                if meter.is_part_over(len(part)):
                    yield None
            yield FamilyReading(family.spec, values)


Labels = tuple[str, ...]


def _pool_adder(spec: FamilySpec, pools: PoolByLabel) -> Callable[[Labels], Labels] | None:
    # Return a function that adds the label pool to those of a series; None: it has none to add.
    #
    # The label's value is "" for a series that belongs to no pool.
    if spec.pool_label is None:
        return None
    name = spec.pool_label
    index = [label.name for label in spec.labels].index(name)
    return lambda labels: (*labels, pools.get((name, labels[index]), ""))


def _values(
    children: Sequence[tuple[Labels, object]],
    spec: FamilySpec,
    unix_offset: float | None,
    add_pool: Callable[[Labels], Labels] | None,
) -> SeriesValues:
    values: SeriesValues = {}
    for labels, child in children:
        value: float | HistogramValue | None
        if isinstance(child, Histogram):
            value = child.snapshot(unix_offset if spec.has_exemplars else None)
        else:
            assert isinstance(child, Counter | Gauge)
            value = child.read()
        if value is not None:
            values[labels if add_pool is None else add_pool(labels)] = value
    return values
