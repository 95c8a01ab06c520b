"""The metrics of workload drift: how a pool's requests differ from those that it was sized for."""

from __future__ import annotations

from gateway.metrics.labels import POOL, Row
from gateway.metrics.metric_types import Counter, Gauge, Label, Merge, MetricFamily, MetricRegistry

MEASURE = Label("measure", 4)


class DriftMetrics:
    """The metrics that compare the requests of pools with the `sized_for` of their configuration.

    With several workers, the supervisor updates them.
    """

    def __init__(self, registry: MetricRegistry) -> None:
        drift = registry.section(Row.CONFIGURATION, "drift/drift_monitor.py")
        self.psi: MetricFamily[Gauge] = drift.gauge(
            "penstock_drift_psi",
            "Population stability index between a pool's last window of requests (ten minutes or "
            "more) and its sized_for, by measure: prompt, output, uncached, turns.",
            *(POOL, MEASURE),
            merge=Merge.MAX,
        )
        self.alarm: MetricFamily[Gauge] = drift.gauge(
            "penstock_drift_alarm",
            "1 while the population stability index of a measure was above 0.2 in the last two "
            "windows of a pool, else 0.",
            *(POOL, MEASURE),
            merge=Merge.MAX,
        )
        self.rate: MetricFamily[Gauge] = drift.gauge(
            "penstock_drift_rate_ratio",
            "Request rate of a pool's last window, divided by the rate of the same hour in its "
            "sized_for.",
            POOL,
            merge=Merge.MAX,
        )
        self.windows: MetricFamily[Counter] = drift.counter(
            "penstock_drift_windows_total",
            "Windows of requests (ten minutes or more each) that were compared with a pool's "
            "sized_for.",
            POOL,
        )

    def remove_pool(self, pool: str) -> None:
        """Remove the metric series of a pool whose section `sized_for` was removed or replaced."""
        for family in (self.psi, self.alarm, self.rate, self.windows):
            family.remove_children("pool", pool)
