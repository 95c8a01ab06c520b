"""The metrics of automatic policy selection (`policy: auto`): comparisons, and policy changes."""

from __future__ import annotations

from gateway.metrics.labels import POOL, RESULT, Row
from gateway.metrics.metric_types import Counter, Gauge, MetricFamily, MetricRegistry


class AutoMetrics:
    """The metric families of automatic policy selection: comparisons of policies, and changes."""

    def __init__(self, registry: MetricRegistry) -> None:
        auto = registry.section(Row.CONFIGURATION, "auto/auto_controller.py")
        self.comparisons: MetricFamily[Counter] = auto.counter(
            "penstock_auto_comparisons_total",
            "Comparisons of a pool's routing policies by replay, by result: keep, advise, switch, "
            "failed.",
            *(POOL, RESULT),
        )
        self.switches: MetricFamily[Counter] = auto.counter(
            "penstock_auto_switches_total",
            "Changes of a pool's routing policy because of a comparison.",
            POOL,
        )
        self.gain: MetricFamily[Gauge] = auto.gauge(
            "penstock_auto_gain_ratio",
            "Share of requests that met their SLO with the best other policy, minus that of the "
            "current policy, in the last comparison.",
            POOL,
        )
        self.error: MetricFamily[Gauge] = auto.gauge(
            "penstock_auto_gain_error_ratio",
            "Half width of the 95 % confidence interval of penstock_auto_gain_ratio.",
            POOL,
        )
        self.replay_cpu: Counter = auto.counter(
            "penstock_auto_replay_cpu_seconds_total",
            "CPU seconds of the processes that replay the access log to compare policies.",
        ).labels()

    def remove_pool(self, pool: str) -> None:
        """Remove the metric series of a pool that no longer uses automatic policy selection."""
        for family in (self.comparisons, self.switches, self.gain, self.error):
            family.remove_children("pool", pool)
