"""Several gateway processes before one mock fleet, with a Redis of their own, and clients that take them in turn."""

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
from tests.e2e.processes import Gateway, gateway
from tests.fair_time import PATIENCE_S
from tests.scraped import total
from tests.sim.conversation import TRACE

KEY = "canary-key-of-a-test-fleet"
TENANT_KEY = "sk-of-a-tenant"
CACHE_FIRST = "sglang_cache_aware"
"""A policy that goes where the prefix is cached unless loads are 64 requests apart. A client that asks the next gateway
within milliseconds is ahead of the news that its last request is over; by load it would be sent elsewhere, rightly."""


@contextmanager
def sharing(
    folder: Path,
    name: str,
    engines: Sequence[str],
    redis: str | None,
    key: str = KEY,
    more: str = "",
    policy: str = "prefix_aware",
) -> Iterator[Gateway]:
    """One gateway; with `redis` one of several; with `more` in its configuration."""
    home = folder / name
    home.mkdir(exist_ok=True)
    pools = ", ".join(f"{{url: '{url}', max_concurrency: 256}}" for url in engines)
    config = f"pools: {{main: {{policy: {policy}, endpoints: [{pools}]}}}}\n{more}"
    if redis is not None:
        config += f"shared: {{redis: {{url: '{redis}'}}, key: '${{SHARED_KEY}}'}}\n"
    with gateway(home, config, SHARED_KEY=key, TENANT_KEY=TENANT_KEY) as running:
        yield running


async def converse(urls: Sequence[str], limit: int, speed: float, first: int = 0) -> BenchReport:
    """The recorded conversation, its requests to the gateways in turn, from the `first` on."""
    arrivals = list(replay(TRACE, limit, speed))[first:]
    plan = BenchPlan(url=urls[0], trace=TRACE, speed=speed, limit=limit, ignore_eos=True)
    records: list[BenchRecord] = []
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(BenchClient(BenchPlan(url=url, ignore_eos=True))) for url in urls]
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
            tasks.append(asyncio.create_task(client.ask(record, messages, arrival.session.turns[0].output_tokens)))
        await asyncio.gather(*tasks)
    return BenchReport(plan, records, 0, False)


def page(running: Gateway) -> str:
    """Its page of metrics."""
    with urllib.request.urlopen(f"{running.admin_url}/metrics", timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
        return text


def metric(running: Gateway, name: str, **labels: str) -> float:
    """The sum over a metric's series that carry these labels."""
    return total(page(running), name, **labels)


def heard_out(pair: Sequence[Gateway], kind: str) -> Callable[[], bool]:
    """Whether two, workers behind one admin server or not, have heard all that they tell each other of a kind: as many
    messages in as out, and no further one for some flushes."""
    looks: deque[tuple[float, float]] = deque(maxlen=10)

    def count(direction: str) -> float:
        name = "penstock_shared_messages_total"
        return sum(metric(each, name, direction=direction, kind=kind) for each in pair)

    def quiet() -> bool:
        looks.append((count("out"), count("in")))
        return len(looks) == looks.maxlen and len({*looks}) == 1 and looks[0][0] == looks[0][1]

    return quiet


def endpoints(running: Gateway) -> list[dict[str, Any]]:
    """What it says of each endpoint."""
    with urllib.request.urlopen(f"{running.admin_url}/endpoints", timeout=PATIENCE_S) as answer:
        found: list[dict[str, Any]] = json.load(answer)["endpoints"]
        return found


def until(happened: Callable[[], bool], within_s: float = PATIENCE_S) -> float:
    """Seconds until it had."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < within_s, "it did not happen in time"
        time.sleep(0.02)  # other processes have nobody to wake us
    return time.monotonic() - began
