"""A large pool's speeds are reviewed in cohorts, so that no review takes long."""

from __future__ import annotations

import asyncio
from random import Random

from gateway.config import config_from_engines
from gateway.fleet.endpoint_table import EndpointTable
from gateway.fleet.prefix_cache import PrefixCacheView
from gateway.fleet.speed_monitor import COHORT, GLANCE_S, REVIEW_S
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics

SIZE = 5 * COHORT


def table_of(size: int) -> EndpointTable:
    urls = [f"http://127.0.0.1:{port}" for port in range(1, size + 1)]
    config = config_from_engines(urls, "round_robin", "127.0.0.1", 0, 0).config
    table = EndpointTable(
        config,
        PrefixCacheView(b"s" * 32, 2**20, 512),
        Metrics(),
        Random(1),
        WriteQueue(asyncio.get_running_loop()),
    )
    table.apply(table.plan(config))
    return table


async def test_every_endpoint_is_reviewed_once_a_second_and_one_cohort_at_a_time() -> None:
    table = table_of(SIZE)
    monitor = table.speed_monitor
    reviews = dict.fromkeys((live.endpoint.name for live in table.all()), 0)
    now = 100.0
    while now < 100.0 + 10 * REVIEW_S:
        table.glance(now)
        assert len(monitor.reviewed) <= COHORT
        for live in monitor.reviewed:
            reviews[live.endpoint.name] += 1
        now += GLANCE_S
    assert set(reviews.values()) <= {9, 10}


async def test_a_stalled_prefill_is_found_among_many_endpoints() -> None:
    """Its peers have shown how long such a prompt takes."""
    table, now = table_of(SIZE), 100.0
    for live in table.all():
        for _ in range(8):
            live.speed.on_sent(1000, now)
            live.speed.on_first_token(1000, now + 0.1)
    stuck = table.all()[SIZE // 2]
    for step in range(int(2 * REVIEW_S / GLANCE_S)):
        table.glance(now + 1.0 + step * GLANCE_S)
    now += 3.0 + REVIEW_S
    stuck.speed.on_sent(1000, now)
    stuck.load.in_flight = stuck.load.prefill_tokens = 1
    late = set()
    for step in range(int(10 / GLANCE_S)):
        late |= {live.endpoint.name for live in table.glance(now + step * GLANCE_S)}
    assert late == {stuck.endpoint.name}


async def test_a_small_pool_is_one_cohort() -> None:
    table = table_of(3)
    table.glance(100.0)
    assert len(table.speed_monitor.reviewed) == 3
