"""Tests that ended requests are accounted, each independently of errors with others."""

from __future__ import annotations

import asyncio
from random import Random

from gateway.config import Observability
from gateway.metrics.catalogue import Metrics
from gateway.request_record import Exchange
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.span_exporter import SpanExporter
from tests.unit.gateway.telemetry.ended_requests import answered, exchange


def accounting(metrics: Metrics, at_once: int = 1) -> Accounting:
    loop = asyncio.get_running_loop()
    log = AccessLog(
        Observability(access_log="off"), loop, metrics.runtime_gauges.log_lines_dropped_total
    )
    traces = SpanExporter(metrics, Random(1), {})
    return Accounting(metrics, log, traces, loop.call_soon, b"secret", at_once=at_once)


async def test_requests_are_accounted_at_the_end_of_the_turn_and_an_error_loses_no_other() -> None:
    metrics = Metrics()
    accounts = accounting(metrics)
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


async def test_several_requests_are_accounted_together_unless_one_has_its_body() -> None:
    metrics = Metrics()
    accounts = accounting(metrics, at_once=3)

    async def accounted_after(*ended: Exchange) -> float:
        for each in ended:
            each.status, each.outcome, each.reason = 503, "refused", "no_capacity"
            accounts.add_ended(each)
        await asyncio.sleep(0)
        return sum(item.value for _, item in metrics.requests_total.children())

    with_body, without_body = exchange(1), exchange(2)
    assert with_body.call is not None
    assert without_body.call is not None
    with_body.call.body = b"{}"
    without_body.call.release()
    assert await accounted_after(without_body) == 0
    assert await accounted_after(without_body) == 0
    assert await accounted_after(without_body) == 3
    assert await accounted_after(without_body) == 3
    assert await accounted_after(with_body) == 5
    assert await accounted_after(without_body) == 5
    accounts.account_ended()
    assert await accounted_after() == 6


async def test_requests_with_a_problem_take_no_place_of_the_sample_of_others() -> None:
    accounts = accounting(Metrics())
    accounts.configure(Observability(access_log="off", explained=8))
    for number in range(20):
        refused = exchange(number)
        refused.status, refused.outcome, refused.reason = 503, "refused", "no_capacity"
        accounts.add_ended(refused)
    usual = exchange(20)
    usual.reason = "ended"
    accounts.add_ended(usual)
    await asyncio.sleep(0)
    newest, *_ = next(accounts.recent_exchanges.newest_first())
    assert newest is usual


async def test_requests_with_a_problem_are_kept_beyond_the_sample_and_others_are_not() -> None:
    accounts = accounting(Metrics())
    accounts.configure(Observability(access_log="off", explained=8))
    burst = [exchange(number) for number in range(100, 110)]
    for x in burst:
        x.reason = "ended"
        accounts.add_ended(x)
    await asyncio.sleep(0)
    kept = [ended[0].id for ended in accounts.recent_exchanges.newest_first()]
    assert kept == [x.id for x in reversed(burst[:8])]
    usual, sampled, refused, late, retried = (exchange(number) for number in range(5))
    sampled.is_explained = True
    for x in (usual, sampled, late, retried):
        x.reason = "ended"
    refused.status, refused.outcome, refused.reason = 503, "refused", "no_capacity"
    late.slo_outcome, retried.retries = "ttft_missed", ["tp0"]
    for x in (usual, sampled, refused, late, retried):
        accounts.add_ended(x)
    await asyncio.sleep(0)
    kept = [ended[0].id for ended in accounts.recent_exchanges.newest_first()]
    assert kept[:4] == [retried.id, late.id, refused.id, sampled.id]
