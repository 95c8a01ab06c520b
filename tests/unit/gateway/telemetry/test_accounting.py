"""Tests that ended requests are accounted, each independently of errors with others."""

from __future__ import annotations

import asyncio
from random import Random

from gateway.config import Observability
from gateway.metrics.catalogue import Metrics
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.span_exporter import SpanExporter
from tests.unit.gateway.telemetry.ended_requests import answered, exchange


async def test_requests_are_accounted_at_the_end_of_the_turn_and_an_error_loses_no_other() -> None:
    loop, metrics = asyncio.get_running_loop(), Metrics()
    log = AccessLog(
        Observability(access_log="off"), loop, metrics.runtime_gauges.log_lines_dropped_total
    )
    traces = SpanExporter(metrics, Random(1), {})
    accounts = Accounting(metrics, log, traces, loop.call_soon, b"secret")
    broken, refused = exchange(1), exchange(2)
    broken.relay = answered(0.5, 0.5, 1)  # accounting fails, because the request has no prediction
    refused.status, refused.outcome, refused.reason = 503, "refused", "no_capacity"
    accounts.add_ended(broken)
    accounts.add_ended(refused)
    assert not dict(metrics.requests_total.children())
    await asyncio.sleep(0)
    assert {labels: item.value for labels, item in metrics.requests_total.children()} == {
        ("demo", "503", "no_capacity"): 1.0
    }
