"""The supervisor's own metrics, which `/metrics` shows together with those of its workers.

No dashboard shows them, because a gateway without workers does not have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.config.value_types import MAX_WORKERS
from gateway.metrics.auto_metrics import AutoMetrics
from gateway.metrics.drift_metrics import DriftMetrics
from gateway.metrics.labels import Row
from gateway.metrics.metric_types import (
    Counter,
    FamilyReading,
    FamilySpec,
    Gauge,
    HistogramValue,
    Label,
    MetricFamily,
    MetricRegistry,
)
from gateway.metrics.process_metrics import ProcessMetrics


class SupervisorMetrics:
    """The metric families of the supervisor process, apart from those of its workers."""

    __slots__ = (
        *("_auto_registry", "_registry", "_process", "auto_metrics", "connections", "deaths_total"),
        "drift_metrics",
        *("frames_dropped_total", "inflight", "workers"),
    )

    def __init__(self) -> None:
        registry = self._registry = MetricRegistry()
        self._process = ProcessMetrics()
        # The supervisor chooses policies and watches for drift on behalf of its workers, whose own
        # metrics of these stay empty.
        self._auto_registry = MetricRegistry()
        self.auto_metrics = AutoMetrics(self._auto_registry)
        self.drift_metrics = DriftMetrics(self._auto_registry)
        own = registry.section(Row.PROCESS, "workers/supervisor.py")
        self.workers: Gauge = own.gauge(
            "penstock_workers", "Worker processes that serve requests now."
        ).labels()
        number = Label("worker", MAX_WORKERS)
        self.connections: MetricFamily[Gauge] = own.gauge(
            "penstock_worker_connections", "Open client connections of each worker process.", number
        )
        self.inflight: MetricFamily[Gauge] = own.gauge(
            "penstock_worker_inflight",
            "Requests of each worker process that were sent to an endpoint and have not ended.",
            number,
        )
        self.deaths_total: Counter = own.counter(
            "penstock_worker_deaths_total", "Worker processes that ended unexpectedly."
        ).labels()
        self.frames_dropped_total: MetricFamily[Counter] = own.counter(
            "penstock_worker_frames_dropped_total",
            "Dropped messages between worker processes, by reason: slow (a receiver did not keep "
            "up), too_long.",
            Label("reason"),
        )

    def catalogue(self) -> tuple[FamilySpec, ...]:
        return tuple(family.spec for family in self._registry.families)

    def collect(self, workers: Mapping[int, Sequence[FamilyReading]]) -> list[FamilyReading]:
        """Return the values of the supervisor's metrics, including its `process_*` metrics.

        `workers` has the metric families of each serving worker by its number. The connections and
        requests in them show how evenly the workers are loaded.
        """
        for family, name in (
            (self.connections, "penstock_connections"),
            (self.inflight, "penstock_inflight"),
        ):
            family.clear()
            for number, readings in workers.items():
                family.labels(str(number)).set(_total(name, readings))
        return [
            *self._registry.collect({}),
            *self._auto_registry.collect({}),
            *self._process.collect(),
        ]


def _total(name: str, readings: Sequence[FamilyReading]) -> float:
    return sum(
        value
        for reading in readings
        if reading.spec.name == name
        for value in reading.values.values()
        if not isinstance(value, HistogramValue)
    )
