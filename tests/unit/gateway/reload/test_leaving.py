"""Tests of endpoints and pools that are removed: running requests finish, then everything is
freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from gateway.fleet.live_endpoint import LiveEndpoint
from mockgpu.tp_group import TpGroup
from policies.health.endpoint_health import HealthEvent, HealthState
from tests.metrics_page import series, total
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def names(harness: Running) -> list[str]:
    return [live.endpoint.name for live in harness.app.gateway.endpoints.all()]


def page(harness: Running) -> str:
    return harness.app.metrics.render().decode()


class Held(NamedTuple):
    answer: asyncio.Task[str]
    busy: LiveEndpoint
    group: TpGroup

    async def let_go(self) -> str:
        assert not self.answer.done()
        self.group.restore()
        return await self.answer


async def held(harness: Running) -> Held:
    for member in harness.members:
        member.group.fail_rank(0, hang=True)
    task = asyncio.create_task(harness.ask())
    await until(lambda: any(live.load.in_flight for live in harness.app.gateway.endpoints.all()))
    busy = next(live for live in harness.app.gateway.endpoints.all() if live.load.in_flight)
    result = next(member for member in harness.members if member.url == busy.endpoint.url)
    for member in harness.members:
        if member is not result:
            member.group.restore()
    return Held(task, busy, result.group)


async def test_a_removed_endpoint_finishes_its_requests_and_gets_no_new_ones(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        one = await held(harness)
        busy = one.busy
        number = int(busy.endpoint.name[-1])
        status, reply = await harness.put(harness.text(1 - number))
        assert (status, reply["affected"]) == (200, 1)
        assert "1 request affected (they finish where they are)" in reply["message"]
        for _ in range(4):
            assert await harness.ask() == "ok"
        assert busy.load.in_flight == 1, "the new ones went elsewhere"
        result = {
            endpoint["name"]: endpoint["state"]
            for endpoint in (await harness.asked("GET", "/endpoints"))[2]["endpoints"]
        }
        assert result == {f"group-{number}": "leaving", f"group-{1 - number}": "up"}
        assert await one.let_go() == "ok"
        await until(lambda: len(names(harness)) == 1)
        await until(lambda: not busy.upstream.connections)
        assert f'endpoint="group-{number}"' not in page(harness)


async def test_late_accounting_does_not_recreate_series_of_a_removed_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as harness:
        accounts = harness.app.gateway.accounts
        monkeypatch.setattr(accounts, "_call_after_turn", Mock())
        assert await harness.ask() == "ok"
        gone = accounts._over[0][0].pick
        assert gone is not None
        number = int(gone.candidate.endpoint.name[-1])
        assert (await harness.put(harness.text(1 - number)))[0] == 200
        await until(lambda: not harness.app.swap.retiring)
        accounts.account_ended()
        assert f'endpoint="group-{number}"' not in page(harness)


async def test_the_up_gauge_is_1_for_ejected_endpoints_beyond_half_a_pool(tmp_path: Path) -> None:
    def up() -> list[str]:
        return sorted(
            line[-3:]
            for line in page(harness).splitlines()
            if line.startswith("penstock_endpoint_up{")
        )

    async with running(tmp_path, more="health: {backoff: 60s, slow_start: 10s}\n") as harness:
        table = harness.app.gateway.endpoints
        for live in table.all() * 3:
            table.on_event(live, HealthEvent.FAILED)
        assert [live.health.state for live in table.all()] == [
            HealthState.EJECTED,
            HealthState.EJECTED,
        ]
        assert up() == ["0.0", "1.0"]
        for live in table.all():
            table.set_drained(live, is_drained=True)
        assert up() == ["0.0", "0.0"]
        (reply,) = [
            line
            for line in page(harness).splitlines()
            if line.startswith("# HELP penstock_endpoint_up ")
        ]
        assert "0 while it is dead, drained, ejected, or new and not yet probed." in reply
        assert "At most half a pool is out of rotation for failures: further failing" in reply
        assert "except those that refuse connections." in reply


async def test_a_drain_by_name_applies_to_the_endpoint_with_that_name_now(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        one = await held(harness)
        name, number = one.busy.endpoint.name, int(one.busy.endpoint.name[-1])
        assert (await harness.put(harness.text(1 - number).replace(f"group-{1 - number}", name)))[
            0
        ] == 200
        status, _, reply = await harness.asked("POST", f"/endpoints/{name}/drain")
        assert (status, reply["in_flight"]) == (200, 0)
        assert [
            live.is_drained for live in harness.app.gateway.endpoints.all() if not live.is_leaving
        ] == [True]
        assert not one.busy.is_drained
        assert await one.let_go() == "ok"


async def test_a_freed_slot_serves_another_endpoint_with_an_empty_cache(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        for number in range(6):
            assert await harness.ask(f"{number} " + "words " * 300) == "ok"
        table = harness.app.gateway.endpoints
        gone = next(live for live in table.all() if live.endpoint.name == "group-0")
        assert (await harness.put(harness.text(1)))[0] == 200
        await until(lambda: len(names(harness)) == 1)
        assert (await harness.put(harness.text()))[0] == 200
        back = next(live for live in table.all() if live.endpoint.name == "group-0")
        assert back is not gone
        assert back.load.slot == gone.load.slot
        assert back.load.in_flight == 0
        assert table.prefixes.index.stats().cached_tokens[back.load.slot] == 0
        await until(lambda: back.load.is_available)
        assert await harness.ask() == "ok"


async def test_an_endpoint_re_added_before_its_last_response_keeps_its_state(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        one = await held(harness)
        before, busy = harness.app.gateway.endpoints.all(), one.busy
        await harness.put(harness.text(1 - int(busy.endpoint.name[-1])))
        await harness.put(harness.text())
        assert harness.app.gateway.endpoints.all() == before
        assert not busy.is_leaving
        assert await one.let_go() == "ok"
        await until(lambda: not harness.app.swap.retiring)
        assert harness.app.gateway.endpoints.all() == before
        assert (
            total(page(harness), "penstock_endpoint_up", endpoint=busy.endpoint.name, pool="chat")
            == 1
        )


async def test_an_attribute_that_changes_takes_effect_on_the_same_endpoint(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        before = harness.app.gateway.endpoints.all()
        changed = harness.text().replace(
            "{name: group-0,", "{name: group-0, max_concurrency: 3, labels: {zone: a},"
        )
        status, reply = await harness.put(changed.replace("stall: 60s", "stall: 7s"))
        assert [change["path"] for change in reply["changes"]] == [
            "pools.chat.endpoints.group-0.labels.zone",
            "pools.chat.endpoints.group-0.max_concurrency",
            "timeouts.stall",
        ]
        first, second = harness.app.gateway.endpoints.all()
        assert (first, second) == before
        assert (first.endpoint.max_concurrency, dict(first.endpoint.labels)) == (3, {"zone": "a"})
        assert first.upstream.timeouts.stall_s == second.upstream.timeouts.stall_s == 7.0
        (candidate, _) = harness.app.gateway.snapshot.routes["demo-8b"].candidates
        assert (candidate.endpoint.max_concurrency, candidate.load) == (3, first.load)
        assert harness.app.gateway.gate.pool_queues()[0]._queue.capacity == 27
        assert status == 200


async def test_a_key_that_changes_is_sent_with_the_next_request(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        await harness.put(
            harness.text().replace("{name: group-0,", "{name: group-0, api_key: sk-engine,")
        )
        first, second = harness.app.gateway.endpoints.all()
        assert b"authorization: Bearer sk-engine\r\n" in first.upstream.request_head("/v1")
        assert first.key_header == {"Authorization": "Bearer sk-engine"}
        assert b"authorization" not in second.upstream.request_head("/v1")


async def test_a_renamed_endpoint_keeps_its_state_and_its_old_series_are_removed(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        assert await harness.ask() == "ok"
        before = harness.app.gateway.endpoints.all()
        await harness.put(harness.text().replace("name: group-0", "name: other"))
        assert harness.app.gateway.endpoints.all() == before
        await until(lambda: not harness.app.swap.retiring)
        assert 'endpoint="group-0"' not in page(harness)
        assert total(page(harness), "penstock_endpoint_up", endpoint="other") == 1


async def test_two_endpoints_that_swap_names_keep_their_series(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        text = (
            harness.text()
            .replace("group-0", "group-x")
            .replace("group-1", "group-0")
            .replace("group-x", "group-1")
        )
        await harness.put(text)
        await until(lambda: not harness.app.swap.retiring)
        for number in (0, 1):
            assert series(page(harness), "penstock_inflight", endpoint=f"group-{number}")


async def test_a_replaced_pool_serves_its_last_requests_and_is_removed(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        one = await held(harness)
        text = harness.text().replace("pool: chat", "pool: talk").replace("  chat:", "  talk:")
        status, reply = await harness.put(text)
        assert (status, reply["affected"]) == (200, 1)
        assert await harness.ask() == "ok"
        assert 'penstock_waiting{pool="chat"}' in page(harness)
        assert await one.let_go() == "ok"
        await until(
            lambda: [room.name for room in harness.app.gateway.gate.pool_queues()] == ["talk"]
        )
        await until(lambda: len(names(harness)) == 2)
        assert 'penstock_waiting{pool="chat"}' not in page(harness)


async def test_requests_that_finish_elsewhere_take_no_place_from_the_new_endpoints(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        one_place = harness.text(0).replace(
            "{name: group-0,", "{name: group-0, max_concurrency: 1,"
        )
        await harness.put(one_place)
        one = await held(harness)
        await harness.put(
            harness.text(1).replace("{name: group-1,", "{name: group-1, max_concurrency: 1,")
        )
        assert await harness.ask(tokens=1) == "ok", "it does not wait for the old one"
        assert await one.let_go() == "ok"


async def test_requests_that_wait_while_endpoints_are_replaced_are_served_by_the_new_ones(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        await harness.put(
            harness.text(0).replace("{name: group-0,", "{name: group-0, max_concurrency: 1,")
        )
        one = await held(harness)
        waits = asyncio.create_task(harness.ask(tokens=1))
        await until(
            lambda: any(room.queue_length for room in harness.app.gateway.gate.pool_queues())
        )
        await harness.put(harness.text(1))
        assert await waits == "ok"
        assert await one.let_go() == "ok"


async def test_keys_change_for_new_requests_at_once_and_for_running_ones_never(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        one = await held(harness)
        await harness.put(harness.text() + "tenants: [{name: a, key: sk-a}]\n")
        assert (await harness.ask()).startswith("401")
        harness.http.headers["Authorization"] = "Bearer sk-a"
        assert await harness.ask() == "ok"
        assert await one.let_go() == "ok"


async def test_a_new_endpoint_gets_no_requests_before_a_successful_probe(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        status, _ = await harness.put(harness.text() + "")
        dead = harness.text().replace(
            "endpoints:\n", "endpoints:\n      - {name: dead, url: http://127.0.0.1:9}\n"
        )
        assert (await harness.put(dead))[0] == 200
        for _ in range(6):
            assert await harness.ask() == "ok"
        assert harness.app.metrics.retries_total._children == {}
        assert status == 200


async def test_failed_and_cancelled_requests_keep_no_old_snapshot_alive(tmp_path: Path) -> None:
    tenants = "tenants: [{name: a, key: sk-a}]\n"
    async with running(tmp_path, more=tenants) as harness:
        assert (await harness.ask()).startswith("401")
        harness.http.headers["Authorization"] = "Bearer sk-a"
        async with harness.http.post(
            f"{harness.app.url}/v1/chat/completions", json={"model": "none"}
        ) as answer:
            assert answer.status in (400, 404)
        async with harness.http.post(f"{harness.app.url}/v1/chat/completions", data=b"{") as answer:
            assert answer.status == 400
        async with harness.http.get(f"{harness.app.url}/v1/models") as answer:
            assert answer.status == 200
        harness.members[0].faults.apply("5xx")
        for _ in range(3):
            await harness.ask()
        left = await held(harness)
        left.answer.cancel()
        await until(
            lambda: not any(live.load.in_flight for live in harness.app.gateway.endpoints.all())
        )
        assert (await harness.put(harness.text(1) + tenants))[0] == 200
        await until(lambda: not harness.app.swap.retiring)
        assert names(harness) == ["group-1"]
