"""Builds endpoint tables from engine URLs, without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from gateway.config import Config, config_from_engines
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.endpoint_registry import RegistryPlan
from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics


def table_of(urls: Sequence[str]) -> tuple[EndpointTable, RegistryPlan, Config]:
    config = config_from_engines(list(urls), "round_robin", "127.0.0.1", 0, 0).config
    table = EndpointTable(
        config,
        PrefixCacheView(b"s" * 32, 2**20, 512),
        Metrics(),
        Random(1),
        WriteQueue(asyncio.get_running_loop()),
    )
    plan = table.plan(config)
    table.apply(plan)
    return table, plan, config
