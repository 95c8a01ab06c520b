"""Endpoints and pools that leave: what began there ends there, then nothing of them is left; who returns is welcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from gateway.roster import LiveEndpoint
from mockgpu.group import TpGroup
from policies.health import Event, State
from tests.scraped import series, total
from tests.unit.gateway.reload.running import Running, running


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def names(made: Running) -> list[str]:
    return [live.endpoint.name for live in made.app.gateway.endpoints.all()]


def page(made: Running) -> str:
    return made.app.metrics.render().decode()


class Held(NamedTuple):
    """An answer under way at the endpoint `busy`, whose group goes on with it when it is let go."""

    answer: asyncio.Task[str]
    busy: LiveEndpoint
    group: TpGroup

    async def let_go(self) -> str:
        assert not self.answer.done()
        self.group.restore()
        return await self.answer


async def held(made: Running) -> Held:
    """One that begins where nobody answers for now; the other groups do."""
    for member in made.members:
        member.group.lose_rank(0, hang=True)
    task = asyncio.create_task(made.ask())
    await until(lambda: any(live.load.in_flight for live in made.app.gateway.endpoints.all()))
    busy = next(live for live in made.app.gateway.endpoints.all() if live.load.in_flight)
    at = next(member for member in made.members if member.url == busy.endpoint.url)
    for member in made.members:
        if member is not at:
            member.group.restore()
    return Held(task, busy, at.group)


async def test_an_endpoint_that_leaves_finishes_what_it_has_and_is_asked_for_nothing_new(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        one = await held(made)
        busy = one.busy
        number = int(busy.endpoint.name[-1])
        status, told = await made.put(made.text(1 - number))
        assert (status, told["affected"]) == (200, 1)
        assert "1 request affected (they finish where they are)" in told["message"]
        for _ in range(4):
            assert await made.ask() == "ok"
        assert busy.load.in_flight == 1, "the new ones went elsewhere"
        found = {each["name"]: each["state"] for each in (await made.asked("GET", "/endpoints"))[2]["endpoints"]}
        assert found == {f"group-{number}": "leaving", f"group-{1 - number}": "up"}
        assert await one.let_go() == "ok"
        await until(lambda: len(names(made)) == 1)
        await until(lambda: not busy.upstream.connections)
        assert f'endpoint="group-{number}"' not in page(made)


async def test_a_request_that_is_accounted_late_brings_no_series_of_a_gone_endpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as made:
        accounts = made.app.gateway.accounts
        monkeypatch.setattr(accounts, "_loop", Mock())
        assert await made.ask() == "ok"
        gone = accounts._over[0][0].pick
        assert gone is not None
        number = int(gone.candidate.endpoint.name[-1])
        assert (await made.put(made.text(1 - number)))[0] == 200
        await until(lambda: not made.app.swap.retiring)
        accounts.settle()
        assert f'endpoint="group-{number}"' not in page(made)


async def test_the_gauge_of_who_may_be_picked_is_1_for_the_ejected_beyond_half_a_pool_as_its_help_says(
    tmp_path: Path,
) -> None:
    def up() -> list[str]:
        return sorted(line[-3:] for line in page(made).splitlines() if line.startswith("penstock_endpoint_up{"))

    async with running(tmp_path, more="health: {backoff: 60s, slow_start: 10s}\n") as made:
        table = made.app.gateway.endpoints
        for live in table.all() * 3:
            table.happened(live, Event.FAILED)
        assert [live.health.state for live in table.all()] == [State.EJECTED, State.EJECTED]
        assert up() == ["0.0", "1.0"]
        for live in table.all():
            table.drain(live, wanted=True)
        assert up() == ["0.0", "0.0"]
        (told,) = [line for line in page(made).splitlines() if line.startswith("# HELP penstock_endpoint_up ")]
        assert "0 while it is dead, drained, ejected, or new and not yet probed." in told
        assert "at most half a pool: further ones may be picked and count 1" in told
        assert "except those that refuse connections." in told


async def test_whoever_drains_a_name_means_the_endpoint_that_has_it_now(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        one = await held(made)
        name, number = one.busy.endpoint.name, int(one.busy.endpoint.name[-1])
        assert (await made.put(made.text(1 - number).replace(f"group-{1 - number}", name)))[0] == 200
        status, _, told = await made.asked("POST", f"/endpoints/{name}/drain")
        assert (status, told["in_flight"]) == (200, 0)
        assert [live.drained for live in made.app.gateway.endpoints.all() if not live.leaving] == [True]
        assert not one.busy.drained
        assert await one.let_go() == "ok"


async def test_a_slot_that_was_freed_serves_another_that_is_believed_to_hold_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        for number in range(6):
            assert await made.ask(f"{number} " + "words " * 300) == "ok"
        table = made.app.gateway.endpoints
        gone = next(live for live in table.all() if live.endpoint.name == "group-0")
        assert (await made.put(made.text(1)))[0] == 200
        await until(lambda: len(names(made)) == 1)
        assert (await made.put(made.text()))[0] == 200
        back = next(live for live in table.all() if live.endpoint.name == "group-0")
        assert back is not gone
        assert back.load.slot == gone.load.slot
        assert back.load.in_flight == 0
        assert table.prefixes.index.stats().held_tokens[back.load.slot] == 0
        await until(lambda: back.load.available)
        assert await made.ask() == "ok"


async def test_an_endpoint_that_returns_while_it_still_answers_is_the_same_one(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        one = await held(made)
        before, busy = made.app.gateway.endpoints.all(), one.busy
        await made.put(made.text(1 - int(busy.endpoint.name[-1])))
        await made.put(made.text())
        assert made.app.gateway.endpoints.all() == before
        assert not busy.leaving
        assert await one.let_go() == "ok"
        await until(lambda: not made.app.swap.retiring)
        assert made.app.gateway.endpoints.all() == before
        assert total(page(made), "penstock_endpoint_up", endpoint=busy.endpoint.name, pool="chat") == 1


async def test_an_attribute_that_changes_takes_effect_on_the_same_endpoint(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        before = made.app.gateway.endpoints.all()
        changed = made.text().replace("{name: group-0,", "{name: group-0, max_concurrency: 3, labels: {zone: a},")
        status, told = await made.put(changed.replace("stall: 60s", "stall: 7s"))
        assert [each["path"] for each in told["changes"]] == [
            "pools.chat.endpoints.group-0.labels.zone",
            "pools.chat.endpoints.group-0.max_concurrency",
            "timeouts.stall",
        ]
        first, second = made.app.gateway.endpoints.all()
        assert (first, second) == before
        assert (first.endpoint.max_concurrency, dict(first.endpoint.labels)) == (3, {"zone": "a"})
        assert first.upstream.patience.stall_s == second.upstream.patience.stall_s == 7.0
        (candidate, _) = made.app.gateway.snapshot.routes["demo-8b"].candidates
        assert (candidate.endpoint.max_concurrency, candidate.load) == (3, first.load)
        assert made.app.gateway.gate.rooms()[0]._queue.capacity == 27
        assert status == 200


async def test_a_key_that_changes_is_sent_with_the_next_request(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        await made.put(made.text().replace("{name: group-0,", "{name: group-0, api_key: sk-engine,"))
        first, second = made.app.gateway.endpoints.all()
        assert b"authorization: Bearer sk-engine\r\n" in first.upstream.head("/v1")
        assert first.key_header == {"Authorization": "Bearer sk-engine"}
        assert b"authorization" not in second.upstream.head("/v1")


async def test_an_endpoint_that_is_renamed_keeps_what_it_is_and_its_old_series_go(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        assert await made.ask() == "ok"
        before = made.app.gateway.endpoints.all()
        await made.put(made.text().replace("name: group-0", "name: other"))
        assert made.app.gateway.endpoints.all() == before
        await until(lambda: not made.app.swap.retiring)
        assert 'endpoint="group-0"' not in page(made)
        assert total(page(made), "penstock_endpoint_up", endpoint="other") == 1


async def test_names_that_two_endpoints_exchange_lose_no_series(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        text = made.text().replace("group-0", "group-x").replace("group-1", "group-0").replace("group-x", "group-1")
        await made.put(text)
        await until(lambda: not made.app.swap.retiring)
        for number in (0, 1):
            assert series(page(made), "penstock_inflight", endpoint=f"group-{number}")


async def test_a_pool_that_is_replaced_answers_its_last_requests_and_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        one = await held(made)
        text = made.text().replace("pool: chat", "pool: talk").replace("  chat:", "  talk:")
        status, told = await made.put(text)
        assert (status, told["affected"]) == (200, 1)
        assert await made.ask() == "ok"
        assert 'penstock_waiting{pool="chat"}' in page(made)
        assert await one.let_go() == "ok"
        await until(lambda: [room.name for room in made.app.gateway.gate.rooms()] == ["talk"])
        await until(lambda: len(names(made)) == 2)
        assert 'penstock_waiting{pool="chat"}' not in page(made)


async def test_requests_that_finish_elsewhere_take_no_place_from_the_new_endpoints(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        one_place = made.text(0).replace("{name: group-0,", "{name: group-0, max_concurrency: 1,")
        await made.put(one_place)
        one = await held(made)
        await made.put(made.text(1).replace("{name: group-1,", "{name: group-1, max_concurrency: 1,"))
        assert await made.ask(tokens=1) == "ok", "it does not wait for the old one"
        assert await one.let_go() == "ok"


async def test_whoever_waits_while_endpoints_are_replaced_is_served_by_the_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        await made.put(made.text(0).replace("{name: group-0,", "{name: group-0, max_concurrency: 1,"))
        one = await held(made)
        waits = asyncio.create_task(made.ask(tokens=1))
        await until(lambda: any(room.waiting for room in made.app.gateway.gate.rooms()))
        await made.put(made.text(1))
        assert await waits == "ok"
        assert await one.let_go() == "ok"


async def test_keys_change_for_new_requests_at_once_and_for_running_ones_never(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        one = await held(made)
        await made.put(made.text() + "tenants: [{name: a, key: sk-a}]\n")
        assert (await made.ask()).startswith("401")
        made.http.headers["Authorization"] = "Bearer sk-a"
        assert await made.ask() == "ok"
        assert await one.let_go() == "ok"


async def test_a_new_endpoint_is_asked_for_nothing_before_a_probe_found_it_well(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        status, _ = await made.put(made.text() + "")
        dead = made.text().replace("endpoints:\n", "endpoints:\n      - {name: dead, url: http://127.0.0.1:9}\n")
        assert (await made.put(dead))[0] == 200
        for _ in range(6):
            assert await made.ask() == "ok"
        assert made.app.metrics.retries_total._children == {}
        assert status == 200


async def test_requests_that_were_refused_broke_or_were_left_keep_no_old_generation(tmp_path: Path) -> None:
    tenants = "tenants: [{name: a, key: sk-a}]\n"
    async with running(tmp_path, more=tenants) as made:
        assert (await made.ask()).startswith("401")
        made.http.headers["Authorization"] = "Bearer sk-a"
        async with made.http.post(f"{made.app.url}/v1/chat/completions", json={"model": "none"}) as answer:
            assert answer.status in (400, 404)
        async with made.http.post(f"{made.app.url}/v1/chat/completions", data=b"{") as answer:
            assert answer.status == 400
        async with made.http.get(f"{made.app.url}/v1/models") as answer:
            assert answer.status == 200
        made.members[0].faults.set("5xx")
        for _ in range(3):
            await made.ask()
        left = await held(made)
        left.answer.cancel()
        await until(lambda: not any(live.load.in_flight for live in made.app.gateway.endpoints.all()))
        assert (await made.put(made.text(1) + tenants))[0] == 200
        await until(lambda: not made.app.swap.retiring)
        assert names(made) == ["group-1"]
