"""Tests that the speeds of many endpoints are compared in small steps, so that none takes long."""

from __future__ import annotations

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.speed_monitor import COHORT, REVIEW_S, STALL_CHECK_S
from tests.unit.gateway.fleet.tables import table_of

SIZE = 5 * COHORT


def large_table(size: int) -> EndpointTable:
    return table_of([f"http://127.0.0.1:{port}" for port in range(1, size + 1)])[0]


async def test_every_endpoint_is_reviewed_once_a_second_and_one_cohort_at_a_time() -> None:
    table = large_table(SIZE)
    monitor = table.speed_monitor
    reviews = dict.fromkeys((live.endpoint.name for live in table.all()), 0)
    now = 100.0
    while now < 100.0 + 10 * REVIEW_S:
        table.check_stalls(now)
        assert len(monitor.reviewed) <= COHORT
        for live in monitor.reviewed:
            reviews[live.endpoint.name] += 1
        now += STALL_CHECK_S
    assert set(reviews.values()) <= {9, 10}


async def test_a_stalled_prefill_is_found_among_many_endpoints() -> None:
    table, now = large_table(SIZE), 100.0
    for live in table.all():
        for _ in range(8):
            live.speed.on_sent(1000, now)
            live.speed.on_first_token(1000, now + 0.1)
    stuck = table.all()[SIZE // 2]
    for step in range(int(2 * REVIEW_S / STALL_CHECK_S)):
        table.check_stalls(now + 1.0 + step * STALL_CHECK_S)
    now += 3.0 + REVIEW_S
    stuck.speed.on_sent(1000, now)
    stuck.load.in_flight = stuck.load.prefill_tokens = 1
    late = set()
    for step in range(int(10 / STALL_CHECK_S)):
        late |= {live.endpoint.name for live in table.check_stalls(now + step * STALL_CHECK_S)}
    assert late == {stuck.endpoint.name}


async def test_a_small_pool_is_one_cohort() -> None:
    table = large_table(3)
    table.check_stalls(100.0)
    assert len(table.speed_monitor.reviewed) == 3
