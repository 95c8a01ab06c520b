"""Tests of the supervisor's metrics: how evenly its workers are loaded."""

from __future__ import annotations

from gateway.metrics.metric_types import FamilyReading, FamilySpec
from gateway.workers.supervisor_metrics import SupervisorMetrics


def readings(connections: float, *inflight: float) -> list[FamilyReading]:
    booked = {(f"e{number}", "main"): value for number, value in enumerate(inflight)}
    return [
        FamilyReading(FamilySpec("penstock_connections", "gauge", "help"), {(): connections}),
        FamilyReading(FamilySpec("penstock_inflight", "gauge", "help"), booked),
    ]


def values(
    metrics: SupervisorMetrics, workers: dict[int, list[FamilyReading]]
) -> dict[str, object]:
    return {
        reading.spec.name: reading.values
        for reading in metrics.collect(workers)
        if reading.spec.name in ("penstock_worker_connections", "penstock_worker_inflight")
    }


def test_connections_and_requests_of_each_worker_show_the_balance() -> None:
    assert values(SupervisorMetrics(), {0: readings(3, 1, 2), 1: readings(5, 4)}) == {
        "penstock_worker_connections": {("0",): 3, ("1",): 5},
        "penstock_worker_inflight": {("0",): 3, ("1",): 4},
    }


def test_a_worker_that_ended_has_no_series() -> None:
    metrics = SupervisorMetrics()
    values(metrics, {0: readings(3), 1: readings(5)})
    assert values(metrics, {1: readings(6)})["penstock_worker_connections"] == {("1",): 6}
