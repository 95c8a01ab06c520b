"""Metrics of the supervisor itself, which `/metrics` shows together with those of its workers.

They are on no dashboard, because a gateway without workers does not have them.
"""

from __future__ import annotations

from gateway.metrics.labels import Row
from gateway.metrics.metric_types import (
    Counter,
    FamilyReading,
    FamilySpec,
    Gauge,
    Label,
    MetricFamily,
    MetricRegistry,
)
from gateway.metrics.process_metrics import ProcessMetrics


class SupervisorMetrics:
    """The metric families of one supervisor."""

    __slots__ = ("_meters", "_process", "deaths_total", "frames_dropped_total", "workers")

    def __init__(self) -> None:
        meters = self._meters = MetricRegistry()
        self._process = ProcessMetrics()
        own = meters.section(Row.PROCESS, "workers/supervisor.py")
        self.workers: Gauge = own.gauge(
            "penstock_workers", "Workers that serve requests now."
        ).labels()
        self.deaths_total: Counter = own.counter(
            "penstock_worker_deaths_total", "Workers that ended unexpectedly."
        ).labels()
        self.frames_dropped_total: MetricFamily[Counter] = own.counter(
            "penstock_worker_frames_dropped_total",
            "Dropped messages between workers: slow (a receiver did not keep up), too_long.",
            Label("reason"),
        )

    def catalogue(self) -> tuple[FamilySpec, ...]:
        """Return the specification of each family, in order."""
        return tuple(family.spec for family in self._meters.families)

    def collect(self) -> list[FamilyReading]:
        """Return the values of the families, and the supervisor's `process_*` metrics."""
        return [*self._meters.collect({}), *self._process.collect()]
