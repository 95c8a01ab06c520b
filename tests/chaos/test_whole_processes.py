"""Tests that engines which die, lose GPUs or hang under load do not affect other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.chaos.fleet_processes import (
    WITHIN_S,
    Clients,
    FleetClient,
    FleetProcesses,
    fleet_client,
    fleet_processes,
)
from tests.duration_limits import pace

USERS = 45  # number of concurrent users: 70 % of the 64 places


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcesses]:
    with fleet_processes(tmp_path_factory.mktemp("chaos"), "    policy: least_loaded\n") as started:
        yield started


@pytest.fixture
async def scene(running: FleetProcesses) -> AsyncIterator[FleetClient]:
    async with fleet_client(running) as client:
        yield client


async def wait_for_answers(clients: Clients, more: int) -> None:
    goal = clients.fates["ok"] + more
    async with asyncio.timeout(WITHIN_S):
        while clients.fates["ok"] < goal:
            await asyncio.sleep(0.05)


def assert_unstarted_unaffected(clients: Clients) -> None:
    # Assert that only streams that had begun broke, and visibly. All others are complete.
    print(dict(clients.fates), f"slowest {clients.slowest_s:.1f} s")
    assert clients.fates["failed"] == 0, clients.problems
    assert clients.fates["silent"] == 0, clients.problems
    assert clients.fates["error_event"] + clients.fates["broken"] <= USERS


async def test_a_killed_group_loses_no_answer_that_had_not_begun(scene: FleetClient) -> None:
    victim = scene.mocks[1]
    async with scene.clients().working(USERS) as clients:
        await wait_for_answers(clients, 100)
        victim.kill()
        assert await scene.until(victim, available=False) < 2 * pace()
        await wait_for_answers(clients, 200)
        victim.start()
        victim.wait_until_ready()
        await scene.until(victim, available=True)
        await wait_for_answers(clients, 200)
        assert (await scene.endpoint(victim))["in_flight"] > 0
    assert_unstarted_unaffected(clients)
    await scene.wait_until_idle()


@pytest.mark.parametrize(
    ("spec", "number", "within_s"), [("lost-rank", 2, 5.0), ("lost-rank:hang", 3, 10.0)]
)
async def test_a_group_that_lost_a_rank_is_removed_and_no_request_hangs(
    scene: FleetClient, spec: str, number: int, within_s: float
) -> None:
    victim, took = scene.mocks[number], scene.stopwatch()
    async with scene.clients().working(USERS) as clients:
        await wait_for_answers(clients, 100)
        await scene.fault(victim, spec)
        took_s = await scene.until(victim, available=False)
        print(f"{spec}: ejected after {took_s:.1f} s")
        assert took_s < within_s * pace()
        await wait_for_answers(clients, 200)
        assert (await scene.endpoint(victim))["in_flight"] == 0
        await scene.fault(victim, "")
        await scene.until(victim, available=True)
        await wait_for_answers(clients, 100)
    assert_unstarted_unaffected(clients)
    assert clients.slowest_s < (within_s + 5) * pace() + took.starved_s
    await scene.wait_until_idle()
