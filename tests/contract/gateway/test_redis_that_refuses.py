"""Tests of the message bus between gateways while Redis refuses writes.

The gateway writes one log line, then retries with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random
from time import monotonic

import pytest
from redis.asyncio import Redis
from redis.exceptions import InvalidResponse, ResponseError

from gateway.peers import redis_bus as shared
from gateway.peers.redis_bus import RedisAddress, RedisBus
from gateway.peers.redis_error import describe_redis_error
from tests.duration_limits import PATIENCE_S
from tests.redis_server import redis_server


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_replica_is_not_used_until_it_accepts_writes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    monkeypatch.setattr(shared, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(shared, "LONGEST_RETRY_S", 0.05)
    with redis_server() as server:
        bus = RedisBus(RedisAddress(server.url, "fleet"), Random(1), lambda reason: None)
        heard: list[bytes] = []
        opened = 0
        connection = bus._connect

        def counted() -> object:
            nonlocal opened
            opened += 1
            return connection()

        monkeypatch.setattr(bus, "_connect", counted)
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
    messages = [record.message for record in caplog.records if "shared state" in record.message]
    assert [line.split(" redis://")[0] for line in (messages[0], messages[-1])] == [
        "shared state: connected to Redis at",
        "shared state: connected again to Redis at",
    ]
    problems = [line for line in messages if line.startswith("shared state: the Redis server at")]
    assert len({*problems}) == len(problems) == len(messages) - 2, (
        "each problem of an outage is logged once"
    )
    assert any("it is a replica and accepts no writes" in line for line in problems)


async def test_a_wrong_password_is_named_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    monkeypatch.setattr(shared, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(shared, "LONGEST_RETRY_S", 0.05)
    with redis_server() as server:
        async with Redis.from_url(server.url) as operator:
            await operator.config_set("requirepass", "right-one")
        bus = RedisBus(
            RedisAddress(server.url, "fleet", password="hunter2"), Random(1), lambda reason: None
        )
        await bus.start(b"me" * 4, lambda frame, age_s: None)
        await until(lambda: bus.state(monotonic()).problem != "")
        assert "it refuses the user or the password" in bus.state(monotonic()).problem
        async with Redis.from_url(server.url, password="right-one") as operator:
            await operator.config_set("requirepass", "hunter2")
        await until(lambda: bus.state(monotonic()).connected)
        assert bus.state(monotonic()).problem == ""
        await bus.stop()
    messages = [record.message for record in caplog.records if "shared state" in record.message]
    assert [line.split(" redis://")[0] for line in messages] == [
        "shared state: the Redis server at",
        "shared state: connected again to Redis at",
    ]
    assert not any("hunter2" in line or "right-one" in line for line in messages)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (ConnectionError("Error 111 connecting"), "ConnectionError"),
        (TimeoutError(), "it does not answer in time"),
        (
            InvalidResponse("Protocol Error: b'HTTP/1.1 400'"),
            "its answers are not those of a Redis",
        ),
        (ConnectionError("Connection closed by server."), "it closed the connection"),
        (
            ConnectionError("Error -2 connecting to redis:6379. Name or service not known."),
            "its host name does not resolve",
        ),
        (
            ResponseError("NOAUTH Authentication required."),
            "it requires a password, and none is configured",
        ),
        (
            ResponseError("AUTH <password> called without any password configured"),
            "a password is configured here",
        ),
        (ResponseError("MISCONF Redis is configured to save"), "it accepts no writes"),
        (ResponseError("anything with sk-secret in it"), "ResponseError"),
    ],
)
def test_errors_of_redis_are_described_without_what_was_sent(
    error: Exception, meaning: str
) -> None:
    assert describe_redis_error(error).startswith(meaning)
    assert "sk-secret" not in describe_redis_error(error)


def test_a_refused_connection_is_named() -> None:
    error = ConnectionError("Error 111")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert "no server listens there" in describe_redis_error(error)
