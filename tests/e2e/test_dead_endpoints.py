"""Tests that no request fails while at least one endpoint of its pool serves."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gateway.fleet.health_checks import RECOVERY_S
from policies.health.endpoint_health import HealthEvent, HealthState
from policies.policy_registry import names
from tests.e2e.engine_fleet import Fleet, Mode, fleet
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

DEAD = (Mode.REFUSES, Mode.RESETS)


def modes(alive: int, of: int, dead: tuple[Mode, ...] = DEAD) -> list[Mode]:
    # Return the modes of `of` engines:
    #
    # `alive` that answer, after others that cycle through `dead`.
    return [dead[index % len(dead)] for index in range(of - alive)] + [Mode.ANSWERS] * alive


def no_endpoint_saw_a_request_twice(running: Fleet) -> bool:
    return all(times == 1 for engine in running.engines for times in engine.posts.values())


@pytest.mark.parametrize("policy", names())
async def test_with_4_of_64_endpoints_alive_at_the_start_no_request_fails(policy: str) -> None:
    async with fleet(modes(alive=4, of=64), policy=policy) as running:
        assert await running.ask_concurrently(64) == Counter({200: 64})
        assert [await running.ask() for _ in range(20)] == [200] * 20
        assert no_endpoint_saw_a_request_twice(running)


@pytest.mark.parametrize("dead", [(Mode.RESETS,), DEAD])
@pytest.mark.parametrize("policy", names())
async def test_when_60_of_64_endpoints_die_under_load_no_request_fails(
    policy: str, dead: tuple[Mode, ...]
) -> None:
    async with fleet([Mode.ANSWERS] * 64, policy=policy, delay_s=0.01) as running:
        over = asyncio.Event()
        load = asyncio.create_task(running.load(32, over))
        await asyncio.sleep(0.1)
        for engine, mode in zip(running.engines, modes(alive=4, of=64, dead=dead), strict=True):
            await engine.switch_to(mode)
        await asyncio.sleep(0.15)
        over.set()
        statuses = await load
        assert set(statuses) == {200}, statuses
        assert no_endpoint_saw_a_request_twice(running)


@pytest.mark.parametrize(
    ("of", "policy"), [(8, "round_robin"), (8, "prefix_aware"), *((16, name) for name in names())]
)
async def test_with_one_endpoint_alive_at_the_start_no_request_fails(of: int, policy: str) -> None:
    async with fleet(modes(alive=1, of=of), policy=policy) as running:
        assert await running.ask_concurrently(24) == Counter({200: 24})
        assert [await running.ask() for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("dead", DEAD)
async def test_one_request_is_enough_to_eject_an_endpoint_that_refuses_or_resets(
    dead: Mode,
) -> None:
    health = {"interval": "60s", "timeout": "5s"}
    async with fleet([Mode.ANSWERS] * 2, policy="round_robin", health=health) as running:
        assert await running.ask_concurrently(4) == Counter({200: 4})
        await running.engines[0].switch_to(dead)
        lost, other = running.app.gateway.endpoints.all()
        sent = running.engines[1].posts.total()
        while lost.health.state is HealthState.UP:
            assert await running.ask() == 200
        assert lost.health.cause is HealthEvent.CONNECT_FAILED
        assert not lost.load.is_available
        assert other.health.state is HealthState.UP
        assert running.engines[1].posts.total() - sent <= 2


@pytest.mark.parametrize("dead", DEAD)
async def test_requests_get_503_while_all_are_dead_and_a_recovered_endpoint_is_used_at_once(
    dead: Mode,
) -> None:
    async with fleet(
        [Mode.ANSWERS] * 4, policy="prefix_aware", health={"backoff": "60s", "backoff_max": "60s"}
    ) as f:
        assert await f.ask_concurrently(8) == Counter({200: 8})
        for engine in f.engines:
            await engine.switch_to(dead)
        while any(live.load.is_available for live in f.app.gateway.endpoints.all()):
            assert await f.ask() in (502, 503)
        for _ in range(20):
            assert await f.ask() == 503
        assert [await f.ask_timed() for _ in range(10)] == [(503, 0.0)] * 10
        assert all(
            live.health.until - live.health.since > 45 for live in f.app.gateway.endpoints.all()
        )
        await f.engines[2].switch_to(Mode.ANSWERS)
        assert RECOVERY_S * 1.1 < 1.5, "the longest recovery and one probe, on an idle machine"
        async with asyncio.timeout(20):  # much less than the back-off of 60 s
            while not any(live.load.is_available for live in f.app.gateway.endpoints.all()):
                await asyncio.sleep(0.05)
        assert await f.ask_concurrently(20) == Counter({200: 20})
