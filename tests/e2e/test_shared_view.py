"""Two gateway processes and a real Redis: one view, one is killed, Redis gone and back, a stranger in the stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random

import aiohttp
import pytest

from tests.e2e.processes import Gateway, mock_fleet
from tests.e2e.shared_house import (
    CACHE_FIRST,
    KEY,
    TENANT_KEY,
    endpoints,
    heard_out,
    metric,
    sharing,
    until,
)
from tests.fair_time import PATIENCE_S, pace
from tests.redis_server import RedisServer, redis_server

TALKS, TURNS = 12, 4
XADD = b"*5\r\n$4\r\nXADD\r\n$12\r\npenstock:all\r\n$1\r\n*\r\n"


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    with mock_fleet() as urls:
        yield urls


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, engines: list[str], redis: RedisServer
) -> Iterator[tuple[Gateway, Gateway]]:
    folder = tmp_path_factory.mktemp("two")
    with (
        sharing(folder, "a", engines, redis.url, policy=CACHE_FIRST) as a,
        sharing(folder, "b", engines, redis.url, policy=CACHE_FIRST) as b,
    ):
        yield a, b
        for each in (a, b):
            assert "Traceback" not in each.said, each.said
            assert KEY not in each.said


async def talk(
    urls: list[str], seed: int, talks: int = TALKS, turns: int = TURNS, agreeing: tuple[Gateway, ...] = ()
) -> float:
    """Conversations whose turns go to the gateways one after another: the share of prompts that engines had cached.

    Every request must be answered. People think between two turns: so long that the `agreeing` know the same.
    """
    rng = Random(seed)
    prompts = ["".join(rng.choices("abcdefghij klmnop", k=rng.randint(10_000, 14_000))) for _ in range(talks)]
    found = total = asked = 0
    async with aiohttp.ClientSession() as http:
        model = await named(http, urls)
        for turn in range(turns):
            for prompt in prompts:
                body = {"model": model, "prompt": prompt + "more words " * 60 * turn, "max_tokens": 1}
                async with http.post(f"{urls[asked % len(urls)]}/v1/completions", json=body) as it:
                    assert it.status == 200, await it.text()
                    usage = (await it.json())["usage"]
                asked += 1
                found += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                total += usage["prompt_tokens"]
            if agreeing:
                agree(agreeing)
            asked += 1  # the next turn of each conversation is another gateway's
    return found / total


def agree(gateways: tuple[Gateway, ...]) -> float:
    """Seconds until all take the engines to hold as much, for ten looks in a row: prompts differ in length, so hardly
    ever has each given every engine as much as the other did before any of them has told."""
    looks: deque[list[list[int]]] = deque(maxlen=10)

    def same() -> bool:
        looks.append([[each["held_tokens"] for each in endpoints(gateway)] for gateway in gateways])
        agreed = all(max(slot) - min(slot) <= 2 for slot in zip(*looks[-1], strict=True))
        return agreed and len(looks) == looks.maxlen and all(look == looks[0] for look in looks)

    return until(same)


async def named(http: aiohttp.ClientSession, urls: list[str]) -> str:
    async with http.get(f"{urls[0]}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


async def test_two_gateways_find_as_much_in_caches_as_one(
    two: tuple[Gateway, Gateway], tmp_path: Path, engines: list[str]
) -> None:
    with sharing(tmp_path, "alone", engines, None, policy=CACHE_FIRST) as alone:
        one = await talk([alone.url], seed=1)
    both = await talk([gateway.url for gateway in two], seed=2, agreeing=two)
    assert one > 0.5
    assert both >= 0.97 * one
    assert [metric(each, "penstock_shared_up") for each in two] == [1.0, 1.0]
    assert [metric(each, "penstock_shared_peers") for each in two] == [1.0, 1.0]
    assert all(metric(each, "penstock_shared_messages_total") > 10 for each in two)
    assert [metric(each, "penstock_shared_dropped_total") for each in two] == [0.0, 0.0]


async def test_a_tenant_gets_one_quota_from_both(tmp_path: Path, engines: list[str], redis: RedisServer) -> None:
    more = "tenants: [{name: a, key: '${TENANT_KEY}', limits: {requests_per_minute: 12}}]\n"
    with (
        sharing(tmp_path, "a", engines, redis.url, "a-key-of-another-fleet", more) as one,
        sharing(tmp_path, "b", engines, redis.url, "a-key-of-another-fleet", more) as two,
    ):
        began = time.monotonic()
        count = await served(one, 8)
        for gateway in (two, one, two):
            until(heard_out([one, two], "taken"))
            count += await served(gateway, 8)
        assert 12 <= count <= 12 + (time.monotonic() - began) / 5 + 1  # one more comes in every five seconds


async def served(gateway: Gateway, times: int) -> int:
    """How many of the tenant's requests are answered, the others being refused for its quota."""
    codes: list[int] = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TENANT_KEY}"}) as http:
        model = await named(http, [gateway.url])
        for _ in range(times):
            body = {"model": model, "prompt": "hello", "max_tokens": 1}
            async with http.post(f"{gateway.url}/v1/completions", json=body) as answer:
                codes.append(answer.status)
    assert set(codes) <= {200, 429}
    return codes.count(200)


async def test_one_that_is_killed_troubles_nobody_and_is_warm_when_it_comes_back(
    two: tuple[Gateway, Gateway], tmp_path: Path, engines: list[str], redis: RedisServer
) -> None:
    survivor = two[0]
    with sharing(tmp_path, "c", engines, redis.url, policy=CACHE_FIRST) as victim:
        before = await talk([survivor.url, victim.url], seed=3, turns=2, agreeing=(survivor, victim))
        load = asyncio.create_task(talk([survivor.url], seed=4))
        os.kill(victim.pid, signal.SIGKILL)
        assert await load > 0.5
    with sharing(tmp_path, "c", engines, redis.url, policy=CACHE_FIRST) as back:
        assert "shared state: warm in " in back.said
        assert float(back.said.partition("warm in ")[2].partition(" s")[0]) < 5.0
        again = await talk([back.url], seed=3, turns=2)
        assert metric(back, "penstock_blind_picks_total") == 0
    assert again > 0.9 > before  # all that was asked before is found by one who was not there


async def test_a_redis_that_goes_costs_no_request_and_all_agree_within_five_seconds_of_its_return(
    two: tuple[Gateway, Gateway], redis: RedisServer
) -> None:
    urls = [gateway.url for gateway in two]
    redis.stop()
    assert await talk(urls, seed=5, turns=3) > 0.0
    until(lambda: all(metric(each, "penstock_shared_up") == 0.0 for each in two))
    until(lambda: all(metric(each, "penstock_shared_staleness_seconds") > 1.0 for each in two))
    await talk([urls[0]], seed=6, turns=1)
    redis.start()
    took_s = until(lambda: all(metric(each, "penstock_shared_staleness_seconds") == 0.0 for each in two))
    took_s += agree(two)
    assert took_s < 5.0 * pace()
    assert [metric(each, "penstock_shared_up") for each in two] == [1.0, 1.0]
    assert await talk([urls[1]], seed=6, turns=1) > 0.9


async def test_a_redis_that_hangs_costs_no_request(two: tuple[Gateway, Gateway], redis: RedisServer) -> None:
    redis.hang()
    try:
        assert await talk([gateway.url for gateway in two], seed=7, turns=2) > 0.0
    finally:
        redis.go_on()
    until(lambda: all(metric(each, "penstock_shared_up") == 1.0 for each in two))


async def test_a_stranger_in_the_stream_is_refused_and_counted(
    two: tuple[Gateway, Gateway], tmp_path: Path, engines: list[str], redis: RedisServer
) -> None:
    before = metric(two[0], "penstock_shared_dropped_total")
    with socket.create_connection(("127.0.0.1", redis.port), 2.0) as line:
        for told in (b"hello", b"PSv1" + bytes(100), bytes(300_000)):
            line.sendall(XADD + b"$1\r\nf\r\n$%d\r\n%s\r\n" % (len(told), told))
            assert line.recv(200).startswith(b"$")
        line.sendall(XADD + b"$1\r\nx\r\n$2\r\nhi\r\n")
        assert line.recv(200).startswith(b"$")
    until(lambda: metric(two[0], "penstock_shared_dropped_total") >= before + 3)
    with sharing(tmp_path, "stranger", engines, redis.url, key="another-key-altogether") as stranger:
        until(lambda: metric(stranger, "penstock_shared_dropped_total") > 0)
        assert metric(stranger, "penstock_shared_peers") == 0
    assert [metric(each, "penstock_shared_peers") for each in two] == [1.0, 1.0]
    assert await talk([two[0].url], seed=8, turns=1) >= 0.0


def test_the_key_is_shown_nowhere(two: tuple[Gateway, Gateway]) -> None:
    for page in ("/config", "/metrics", "/endpoints", "/config/versions"):
        with urllib.request.urlopen(two[0].admin_url + page, timeout=PATIENCE_S) as answer:
            assert KEY not in answer.read().decode(), page
    with urllib.request.urlopen(two[0].admin_url + "/config", timeout=PATIENCE_S) as answer:
        assert json.load(answer)["config"]["shared"]["key"] == "${SHARED_KEY}"
