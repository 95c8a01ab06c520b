"""Writes metrics in the text format of Prometheus, or in OpenMetrics, which supports exemplars.

The values come from gateway/metrics/metric_types.py and gateway/workers/metrics_merge.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as PROMETHEUS
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector

from gateway.metrics.metric_types import FamilyReading, FamilySpec, HistogramValue, RequestExemplar

OPENMETRICS_EOF = b"# EOF\n"

_FAMILIES: Mapping[str, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


PART_SERIES, PART_HISTOGRAMS = 64, 4
"""How much is rendered at once before other work may run: number of series, or of histograms.

Each takes about half a millisecond.
"""

_HEADER = re.compile(rb"\A(?:# [^\n]*\n)*")


def wants_openmetrics(accept: str) -> bool:
    """Return whether a scraper that sends this Accept header prefers OpenMetrics."""
    return "application/openmetrics-text" in accept


def content_type(*, exemplars: bool) -> str:
    """Return the Content-Type of a metrics page. A page with exemplars is OpenMetrics."""
    return OPENMETRICS if exemplars else PROMETHEUS


def render_page(readings: Iterable[FamilyReading], *, exemplars: bool) -> bytes:
    families = b"".join(render_family(reading, exemplars=exemplars) for reading in readings)
    return families + page_end(exemplars=exemplars)


def page_end(*, exemplars: bool) -> bytes:
    """Return the last line of a metrics page: "# EOF" in OpenMetrics, "" in Prometheus' format."""
    return OPENMETRICS_EOF if exemplars else b""


def render_family(reading: FamilyReading, *, exemplars: bool) -> bytes:
    """Return the values of one metric family as text, in Prometheus' format or in OpenMetrics."""
    collector = _SingleFamily(_metric(reading, exemplars=exemplars))
    if not exemplars:
        return generate_latest(collector)
    rendered: bytes = openmetrics(collector)  # type: ignore[no-untyped-call]
    return rendered.removesuffix(OPENMETRICS_EOF)


def render_family_in_parts(reading: FamilyReading, *, exemplars: bool) -> Iterator[bytes]:
    """Yield the text of one metric family, a few series at a time.

    Writing the series of a thousand endpoints takes long, so the caller can do other work between
    two parts.
    """
    labels = list(reading.values)
    size = PART_HISTOGRAMS if reading.spec.buckets else PART_SERIES
    for begin in range(0, len(labels) or 1, size):
        values = {key: reading.values[key] for key in labels[begin : begin + size]}
        part = render_family(FamilyReading(reading.spec, values), exemplars=exemplars)
        yield part if not begin else _HEADER.sub(b"", part)


class _SingleFamily(Collector):
    # A collector of one family, since prometheus-client renders only collectors.

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _metric(reading: FamilyReading, *, exemplars: bool) -> Metric:
    spec = reading.spec
    metric = _FAMILIES[spec.kind](spec.name, spec.help, labels=spec.exposed_labels, unit=spec.unit)
    for labels, value in reading.values.items():
        if isinstance(value, HistogramValue):
            if isinstance(metric, HistogramMetricFamily):
                buckets = _cumulative(spec, value, exemplars=exemplars)
                metric.add_metric(labels, buckets, value.sum)
        elif isinstance(metric, CounterMetricFamily | GaugeMetricFamily):
            metric.add_metric(labels, value)
    return metric


def _cumulative(
    spec: FamilySpec, buckets: HistogramValue, *, exemplars: bool
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    # Return (upper bound, number of observations up to it) of each bucket; the last bound is +Inf.
    #
    # With exemplars, a bucket's newest request is added if it is known.
    total = 0
    rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    bounds = (*map(repr, spec.buckets), "+Inf")
    marks = buckets.exemplars if exemplars and buckets.exemplars else [None] * len(buckets.counts)
    for bound, count, mark in zip(bounds, buckets.counts, marks, strict=True):
        total += count
        if mark is None:
            rows.append((bound, float(total)))
        else:
            rows.append((bound, float(total), _exemplar(mark)))
    return rows


def _exemplar(mark: RequestExemplar) -> Exemplar:
    value, time, request_id, trace_id = mark
    labels = {"request_id": request_id}
    if trace_id:
        labels["trace_id"] = trace_id
    return Exemplar(labels, value, time)
