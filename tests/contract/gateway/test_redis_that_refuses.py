"""A Redis that lets gateways in and refuses to be written to: no bus, told once, and asked ever more seldom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random
from time import monotonic

import pytest
from redis.asyncio import Redis

from gateway.shared import redis as shared
from gateway.shared.redis import Place, RedisBus
from tests.fair_time import PATIENCE_S
from tests.redis_server import redis_server


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_replica_is_no_bus_until_it_takes_what_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    monkeypatch.setattr(shared, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(shared, "LONGEST_RETRY_S", 0.05)
    with redis_server() as server:
        bus = RedisBus(Place(server.url, "fleet"), Random(1), lambda reason: None)
        heard: list[bytes] = []
        opened = 0
        connection = bus._connection

        def counted() -> object:
            nonlocal opened
            opened += 1
            return connection()

        monkeypatch.setattr(bus, "_connection", counted)
        here: list[bool] = []
        await bus.start(b"me" * 4, lambda frame, age_s: heard.append(frame))
        await until(lambda: bus.state(monotonic()).connected)
        async with Redis.from_url(server.url) as operator:
            await operator.execute_command("REPLICAOF", "127.0.0.1", "1")
            bus.publish(b"refused at first")
            await until(lambda: not bus.state(monotonic()).connected)
            before = opened
            while opened < before + 6:
                here.append(bus.state(monotonic()).connected)
                await asyncio.sleep(0.001)
            assert not any(here)
            await operator.execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: bus.state(monotonic()).connected and heard == [b"refused at first"])
        await bus.stop()
    told = [record.message for record in caplog.records if "shared view" in record.message]
    assert [line.split(" at ")[0] for line in told] == [
        "shared view: Redis",
        "shared view: no Redis",
        "shared view: Redis",
    ]
