"""The standard process_* metrics of this process: memory, CPU time and file descriptors."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.process_collector import ProcessCollector

from gateway.metrics.metric_types import FamilyReading, FamilySpec, Merge


class ProcessMetrics:
    """Reads the metrics of this process from /proc. It uses no global registry of metrics."""

    __slots__ = ("_collector",)

    def __init__(self) -> None:
        self._collector = ProcessCollector(registry=None)

    def collect(self) -> Iterator[FamilyReading]:
        return map(_reading, self._collector.collect())


def _reading(metric: Metric) -> FamilyReading:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    # The start of a group of processes is the start of its first one.
    is_start = metric.name == "process_start_time_seconds"
    merge = Merge.MIN if is_start else Merge.SUM
    spec = FamilySpec(name, metric.type, metric.documentation, merge=merge)
    return FamilyReading(spec, {(): metric.samples[0].value})
