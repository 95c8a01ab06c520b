"""Tests of two gateways that share state through a real Redis, while one of the processes fails."""

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

from tests.duration_limits import PATIENCE_S, Stopwatch, pace
from tests.e2e.processes import GatewayProcess, mock_fleet
from tests.e2e.shared_fleet import (
    CACHE_FIRST,
    KEY,
    TENANT_KEY,
    all_messages_delivered,
    endpoints,
    metric,
    shared_gateway,
    wait_until,
)
from tests.redis_server import RedisServer, redis_server

CONVERSATIONS, TURNS = 12, 4
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
) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    folder = tmp_path_factory.mktemp("two")
    with (
        shared_gateway(folder, "a", engines, redis.url, policy=CACHE_FIRST) as a,
        shared_gateway(folder, "b", engines, redis.url, policy=CACHE_FIRST) as b,
    ):
        yield a, b
        for gateway in (a, b):
            assert "Traceback" not in gateway.stderr_text, gateway.stderr_text
            assert KEY not in gateway.stderr_text


async def converse(
    urls: list[str],
    seed: int,
    conversations: int = CONVERSATIONS,
    turns: int = TURNS,
    agreeing: tuple[GatewayProcess, ...] = (),
) -> float:
    # Simulate conversations whose turns alternate between the gateways.
    #
    # Returns the share of prompt tokens that the engines had cached. Every request must succeed.
    # Between two turns, it waits until the `agreeing` gateways have the same state.
    rng = Random(seed)
    prompts = [
        "".join(rng.choices("abcdefghij klmnop", k=rng.randint(10_000, 14_000)))
        for _ in range(conversations)
    ]
    cached_tokens = total = n_requests = 0
    async with aiohttp.ClientSession() as http:
        model = await model_name(http, urls)
        for turn in range(turns):
            for prompt in prompts:
                body = {
                    "model": model,
                    "prompt": prompt + "more words " * 60 * turn,
                    "max_tokens": 1,
                }
                async with http.post(
                    f"{urls[n_requests % len(urls)]}/v1/completions", json=body
                ) as answer:
                    assert answer.status == 200, await answer.text()
                    usage = (await answer.json())["usage"]
                n_requests += 1  # the next request goes to the next gateway
                cached_tokens += (usage.get("prompt_tokens_details") or {}).get(
                    "cached_tokens"
                ) or 0
                total += usage["prompt_tokens"]
            if agreeing:
                wait_for_agreement(agreeing)
            n_requests += 1  # shift, so that each conversation changes its gateway
    return cached_tokens / total


def wait_for_agreement(gateways: tuple[GatewayProcess, ...]) -> float:
    # Wait until all gateways report the same cached tokens per engine.
    #
    # Returns the seconds that this took. The condition must hold for ten polls in a row. Prompts
    # differ in length, so that numbers are unlikely to be equal by chance.
    looks: deque[list[list[int]]] = deque(maxlen=10)

    def have_agreed() -> bool:
        looks.append([[row["held_tokens"] for row in endpoints(gateway)] for gateway in gateways])
        agreed = all(max(slot) - min(slot) <= 2 for slot in zip(*looks[-1], strict=True))
        return agreed and len(looks) == looks.maxlen and all(look == looks[0] for look in looks)

    return wait_until(have_agreed)


def are_peers(pair: tuple[GatewayProcess, GatewayProcess]) -> bool:
    # Return whether two gateways are connected and know each other. A gateway forgets the other one
    # for a moment if that gets no CPU.
    names = ("penstock_shared_up", "penstock_shared_peers")
    return all(metric(gateway, name) == 1.0 for gateway in pair for name in names)


async def model_name(http: aiohttp.ClientSession, urls: list[str]) -> str:
    async with http.get(f"{urls[0]}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


async def test_two_gateways_reach_the_cache_hit_ratio_of_one(
    two: tuple[GatewayProcess, GatewayProcess], tmp_path: Path, engines: list[str]
) -> None:
    with shared_gateway(tmp_path, "alone", engines, None, policy=CACHE_FIRST) as alone:
        one = await converse([alone.url], seed=1)
    both = await converse([gateway.url for gateway in two], seed=2, agreeing=two)
    assert one > 0.5
    assert both >= 0.97 * one
    wait_until(lambda: are_peers(two))
    assert all(metric(gateway, "penstock_shared_messages_total") > 10 for gateway in two)
    assert [metric(gateway, "penstock_shared_dropped_total") for gateway in two] == [0.0, 0.0]


async def test_a_tenant_has_one_quota_across_both_gateways(
    tmp_path: Path, engines: list[str], redis: RedisServer
) -> None:
    more = "tenants: [{name: a, key: '${TENANT_KEY}', limits: {requests_per_minute: 12}}]\n"
    with (
        shared_gateway(tmp_path, "a", engines, redis.url, "a-key-of-another-fleet", more) as one,
        shared_gateway(tmp_path, "b", engines, redis.url, "a-key-of-another-fleet", more) as two,
    ):
        began = time.monotonic()
        count = await count_served(one, 8)
        for gateway in (two, one, two):
            wait_until(all_messages_delivered([one, two], "taken"))
            count += await count_served(gateway, 8)
        assert (
            12 <= count <= 12 + (time.monotonic() - began) / 5 + 1
        )  # the quota refills every five seconds


async def count_served(gateway: GatewayProcess, times: int) -> int:
    # Send `times` requests of a tenant; return how many its quota admitted.
    codes: list[int] = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TENANT_KEY}"}) as http:
        model = await model_name(http, [gateway.url])
        for _ in range(times):
            body = {"model": model, "prompt": "hello", "max_tokens": 1}
            async with http.post(f"{gateway.url}/v1/completions", json=body) as answer:
                codes.append(answer.status)
    assert set(codes) <= {200, 429}
    return codes.count(200)


async def test_a_killed_gateway_does_not_affect_the_other_and_restarts_with_a_warm_index(
    two: tuple[GatewayProcess, GatewayProcess],
    tmp_path: Path,
    engines: list[str],
    redis: RedisServer,
) -> None:
    survivor = two[0]
    with shared_gateway(tmp_path, "c", engines, redis.url, policy=CACHE_FIRST) as victim:
        before = await converse(
            [survivor.url, victim.url], seed=3, turns=2, agreeing=(survivor, victim)
        )
        load = asyncio.create_task(converse([survivor.url], seed=4))
        os.kill(victim.pid, signal.SIGKILL)
        assert await load > 0.5
    with shared_gateway(tmp_path, "c", engines, redis.url, policy=CACHE_FIRST) as restarted:
        received = "shared state: received from other gateways in "
        wait_until(lambda: received in restarted.stderr_text)
        took = restarted.stderr_text.partition(received)[2]
        assert float(took.partition(" s")[0]) < 5.0 * pace()
        again = await converse([restarted.url], seed=3, turns=2)
        assert metric(restarted, "penstock_blind_picks_total") == 0
    assert again > 0.9 > before  # the restarted gateway knows prompts from before its start


async def test_a_redis_outage_fails_no_request_and_views_agree_within_five_seconds_after_it(
    two: tuple[GatewayProcess, GatewayProcess], redis: RedisServer
) -> None:
    urls = [gateway.url for gateway in two]
    redis.stop()
    assert await converse(urls, seed=5, turns=3) > 0.0
    wait_until(lambda: all(metric(gateway, "penstock_shared_up") == 0.0 for gateway in two))
    wait_until(
        lambda: all(metric(gateway, "penstock_shared_staleness_seconds") > 1.0 for gateway in two)
    )
    await converse([urls[0]], seed=6, turns=1)
    redis.start()
    took = Stopwatch(*(gateway.pid for gateway in two))
    wait_until(
        lambda: all(metric(gateway, "penstock_shared_staleness_seconds") == 0.0 for gateway in two)
    )
    wait_for_agreement(two)
    assert took.fair_s < 5.0 * pace()
    wait_until(lambda: all(metric(gateway, "penstock_shared_up") == 1.0 for gateway in two))
    assert await converse([urls[1]], seed=6, turns=1) > 0.9


async def test_a_hanging_redis_fails_no_request(
    two: tuple[GatewayProcess, GatewayProcess], redis: RedisServer
) -> None:
    redis.hang()
    try:
        assert await converse([gateway.url for gateway in two], seed=7, turns=2) > 0.0
    finally:
        redis.resume()
    wait_until(lambda: all(metric(gateway, "penstock_shared_up") == 1.0 for gateway in two))


async def test_messages_without_the_key_are_dropped_and_counted(
    two: tuple[GatewayProcess, GatewayProcess],
    tmp_path: Path,
    engines: list[str],
    redis: RedisServer,
) -> None:
    before = metric(two[0], "penstock_shared_dropped_total")
    with socket.create_connection(("127.0.0.1", redis.port), 2.0) as line:
        for payload in (b"hello", b"PSv1" + bytes(100), bytes(300_000)):
            line.sendall(XADD + b"$1\r\nf\r\n$%d\r\n%s\r\n" % (len(payload), payload))
            assert line.recv(200).startswith(b"$")
        line.sendall(XADD + b"$1\r\nx\r\n$2\r\nhi\r\n")
        assert line.recv(200).startswith(b"$")
    wait_until(lambda: metric(two[0], "penstock_shared_dropped_total") >= before + 3)
    with shared_gateway(
        tmp_path, "stranger", engines, redis.url, key="another-key-altogether"
    ) as stranger:
        wait_until(lambda: metric(stranger, "penstock_shared_dropped_total") > 0)
        assert metric(stranger, "penstock_shared_peers") == 0
    wait_until(lambda: are_peers(two))
    assert await converse([two[0].url], seed=8, turns=1) >= 0.0


def test_no_page_shows_the_key(two: tuple[GatewayProcess, GatewayProcess]) -> None:
    for page in ("/config", "/metrics", "/endpoints", "/config/versions"):
        with urllib.request.urlopen(two[0].admin_url + page, timeout=PATIENCE_S) as answer:
            assert KEY not in answer.read().decode(), page
    with urllib.request.urlopen(two[0].admin_url + "/config", timeout=PATIENCE_S) as answer:
        assert json.load(answer)["config"]["shared"]["key"] == "${SHARED_KEY}"
