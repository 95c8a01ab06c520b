"""Runs several gateway processes that share state through Redis, and clients that use all of
them.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from planner.bench import BenchClient, BenchPlan, BenchRecord, BenchReport
from planner.bench.workloads import replay
from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.metrics_page import total
from tests.sim.conversation import TRACE

KEY = "canary-key-of-a-test-fleet"
TENANT_KEY = "sk-of-a-tenant"
CACHE_FIRST = "sglang_cache_aware"
"""A policy that follows the cached prefix unless loads differ by 64 requests.

A client that uses the next gateway within milliseconds is faster than the message that its last
request has ended. A policy that follows load would then rightly choose another endpoint.
"""


@contextmanager
def shared_gateway(
    folder: Path,
    name: str,
    engines: Sequence[str],
    redis: str | None,
    key: str = KEY,
    more: str = "",
    policy: str = "prefix_aware",
) -> Iterator[GatewayProcess]:
    # Run one gateway, with the YAML `more` added to its configuration.
    #
    # It shares state with the others if `redis` is set.
    directory = folder / name
    directory.mkdir(exist_ok=True)
    pools = ", ".join(f"{{url: '{url}', max_concurrency: 256}}" for url in engines)
    config = f"pools: {{main: {{policy: {policy}, endpoints: [{pools}]}}}}\n{more}"
    if redis is not None:
        config += f"shared: {{redis: {{url: '{redis}'}}, key: '${{SHARED_KEY}}'}}\n"
    with gateway_process(directory, config, SHARED_KEY=key, TENANT_KEY=TENANT_KEY) as running:
        yield running


async def replay_conversation(
    urls: Sequence[str], limit: int, speed: float, first: int = 0
) -> BenchReport:
    # Replay `limit` requests of the recorded trace, beginning with number `first`.
    #
    # The requests go to the gateways in turn.
    arrivals = list(replay(TRACE, limit, speed))[first:]
    plan = BenchPlan(url=urls[0], trace=TRACE, speed=speed, limit=limit, ignore_eos=True)
    records: list[BenchRecord] = []
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(BenchClient(BenchPlan(url=url, ignore_eos=True)))
            for url in urls
        ]
        for client in clients:
            await client.model()
        began, offset = time.perf_counter(), arrivals[0].due_s
        tasks = []
        for arrival, client in zip(arrivals, cycle(clients), strict=False):
            due_s = began + arrival.due_s - offset
            await asyncio.sleep(due_s - time.perf_counter())
            record = BenchRecord(arrival.session.id, 0, due_s, due_s)
            records.append(record)
            messages = [{"role": "user", "content": arrival.session.turns[0].content}]
            tasks.append(
                asyncio.create_task(
                    client.ask(record, messages, arrival.session.turns[0].output_tokens)
                )
            )
        await asyncio.gather(*tasks)
    return BenchReport(plan, records, 0, False)


def metrics_page(running: GatewayProcess) -> str:
    # Return the gateway's /metrics page as text.
    with urllib.request.urlopen(f"{running.admin_url}/metrics", timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
        return text


def metric(running: GatewayProcess, name: str, **labels: str) -> float:
    return total(metrics_page(running), name, **labels)


def all_messages_delivered(pair: Sequence[GatewayProcess], kind: str) -> Callable[[], bool]:
    # Return a function that checks that all messages of a kind were delivered between gateways.
    #
    # The function returns True once as many messages were received as sent, and no message followed
    # during ten calls. It also works for two workers behind one admin server.
    looks: deque[tuple[float, float]] = deque(maxlen=10)

    def count(direction: str) -> float:
        name = "penstock_shared_messages_total"
        return sum(metric(gateway, name, direction=direction, kind=kind) for gateway in pair)

    def quiet() -> bool:
        looks.append((count("out"), count("in")))
        return len(looks) == looks.maxlen and len({*looks}) == 1 and looks[0][0] == looks[0][1]

    return quiet


def endpoints(running: GatewayProcess) -> list[dict[str, Any]]:
    # Return the rows of the gateway's /endpoints page.
    with urllib.request.urlopen(f"{running.admin_url}/endpoints", timeout=PATIENCE_S) as answer:
        rows: list[dict[str, Any]] = json.load(answer)["endpoints"]
        return rows


def wait_until(is_met: Callable[[], bool], within_s: float = PATIENCE_S) -> float:
    began = time.monotonic()
    while not is_met():
        assert time.monotonic() - began < within_s, "the condition was not met in time"
        time.sleep(0.02)  # another process cannot signal this one
    return time.monotonic() - began
