"""What the supervisor counts itself. Its `/metrics` shows these beside what its workers tell (gateway/workers/metrics_merge.py).

They stand on no board: a gateway without workers has none of them.
"""

from __future__ import annotations

from gateway.metrics.labels import Row
from gateway.metrics.metric_types import Counter, Family, Gauge, Label, Meters, Reading, Spec
from gateway.metrics.process_metrics import ProcessMetrics


class Figures:
    """The supervisor's families; one per supervisor."""

    __slots__ = ("_meters", "_process", "deaths_total", "frames_dropped_total", "workers")

    def __init__(self) -> None:
        meters = self._meters = Meters()
        self._process = ProcessMetrics()
        own = meters.section(Row.PROCESS, "workers/supervisor.py")
        self.workers: Gauge = own.gauge("penstock_workers", "Workers that serve now.").labels()
        self.deaths_total: Counter = own.counter(
            "penstock_worker_deaths_total", "Workers that ended without being asked."
        ).labels()
        self.frames_dropped_total: Family[Counter] = own.counter(
            "penstock_worker_frames_dropped_total",
            "Messages between workers that were given up: slow (one did not keep up with hearing), too_long.",
            Label("reason"),
        )

    def catalogue(self) -> tuple[Spec, ...]:
        """What there is, in order."""
        return tuple(family.spec for family in self._meters.families)

    def readings(self) -> list[Reading]:
        """Their values, and the `process_*` metrics of the supervisor."""
        return [*self._meters.readings({}), *self._process.readings()]
