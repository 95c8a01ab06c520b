"""The text of a scrape, in Prometheus' format or in OpenMetrics', which has a place for exemplars.

Lives here: formats and their choice. Not here: where readings come from (meters.py, workers/merge.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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

from gateway.meters import Buckets, Mark, Reading, Spec

EOF = b"# EOF\n"

_FAMILIES: Mapping[str, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def wants_openmetrics(accept: str) -> bool:
    """Whether a scraper that sends this Accept header is answered in OpenMetrics' format."""
    return "application/openmetrics-text" in accept


def content_type(*, exemplars: bool) -> str:
    """The Content-Type of a page; one with exemplars is OpenMetrics'."""
    return OPENMETRICS if exemplars else PROMETHEUS


def page(readings: Iterable[Reading], *, exemplars: bool) -> bytes:
    """The whole page."""
    return b"".join(text(each, exemplars=exemplars) for each in readings) + end(exemplars=exemplars)


def end(*, exemplars: bool) -> bytes:
    """The last line of a page."""
    return EOF if exemplars else b""


def text(reading: Reading, *, exemplars: bool) -> bytes:
    """One family's part of a page."""
    family = _Family(_metric(reading, exemplars=exemplars))
    if not exemplars:
        return generate_latest(family)
    written: bytes = openmetrics(family)  # type: ignore[no-untyped-call]
    return written.removesuffix(EOF)


class _Family(Collector):
    """One family, as a registry of prometheus-client is asked for it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _metric(reading: Reading, *, exemplars: bool) -> Metric:
    spec = reading.spec
    shown = _FAMILIES[spec.kind](spec.name, spec.help, labels=spec.exposed, unit=spec.unit)
    for values, value in reading.values.items():
        if isinstance(shown, HistogramMetricFamily) and isinstance(value, Buckets):
            shown.add_metric(values, _cumulative(spec, value, exemplars=exemplars), value.sum)
        elif isinstance(shown, CounterMetricFamily | GaugeMetricFamily) and not isinstance(
            value, Buckets
        ):
            shown.add_metric(values, value)
    return shown


def _cumulative(
    spec: Spec, buckets: Buckets, *, exemplars: bool
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """(upper bound, observations at or below it, the newest request of the bucket if it is known), +Inf last."""
    total, shown = 0, []
    bounds = (*map(repr, spec.buckets), "+Inf")
    marks = buckets.marks if exemplars and buckets.marks else [None] * len(buckets.counts)
    for bound, count, mark in zip(bounds, buckets.counts, marks, strict=True):
        total += count
        shown.append(
            (bound, float(total)) if mark is None else (bound, float(total), _exemplar(mark))
        )
    return shown


def _exemplar(mark: Mark) -> Exemplar:
    value, at, request_id, trace_id = mark
    return Exemplar(
        {"request_id": request_id} | ({"trace_id": trace_id} if trace_id else {}), value, at
    )
