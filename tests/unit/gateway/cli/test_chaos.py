"""`penstock chaos` and the door it uses: only mocks that were given one, only from this machine, never from a page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import main
from gateway.fleet.endpoint_registry import described
from mockgpu.chaos_server import open_door
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet


class Broken:
    """A gateway before two mocks with a door, and a hand that types."""

    def __init__(self, home: GatewayFleet, door: int) -> None:
        self.home = home
        self.door = f"http://127.0.0.1:{door}"

    async def types(self, *words: str) -> tuple[int, str]:
        def run() -> tuple[int, str]:
            done = CliRunner().invoke(main.app, ["chaos", *words, "--admin", self.home.app.admin_url])
            return done.exit_code, done.output

        return await asyncio.to_thread(run)


@pytest.fixture
async def broken() -> AsyncIterator[Broken]:
    async with AsyncExitStack() as stack:
        home = await stack.enter_async_context(gateway_fleet(2))
        port = await stack.enter_async_context(open_door(home.groups, 0))
        for name, live in zip("ab", home.app.gateway.endpoints.all(), strict=True):
            spec = live.spec.model_copy(update={"name": name, "labels": {"chaos": f"127.0.0.1:{port}"}})
            live.endpoint = described("main", spec)
        yield Broken(home, port)


async def test_a_group_is_killed_the_gateway_sees_it_and_it_is_restored(broken: Broken) -> None:
    code, said = await broken.types("kill", "b")
    assert code == 0
    assert "killed b (http://127.0.0.1:" in said
    assert "the gateway took it out after 0." in said or "the gateway took it out after 1." in said
    assert "1 of 2 endpoints serve" in said
    assert (await broken.home.ask()).fate == "ok"
    code, said = await broken.types("restore")
    assert code == 0
    assert "restored b (" in said
    assert "restored a" not in said
    assert "2 of 2 endpoints serve" in said
    assert (await broken.types("restore"))[1] == "nothing is broken\n"


async def test_every_word_is_a_fault_that_the_mock_knows(broken: Broken) -> None:
    code, said = await broken.types("slow", "a", "--factor", "3", "--for", "250ms", "--json")
    told: dict[str, Any] = json.loads(said)
    assert (code, told["spec"], told["targets"][0]["name"]) == (0, "slow:x=3@0-0.25", "a")
    assert broken.home.groups[0].faults.spec == "slow:x=3@0-0.25"
    code, said = await broken.types("lose-rank", "a", "--rank", "0")
    assert (code, "took a GPU from a" in said, "(engine_dead)" in said) == (0, True, True)


async def test_where_no_endpoint_may_be_broken_there_is_none_to_restore(broken: Broken) -> None:
    for live in broken.home.app.gateway.endpoints.all():
        live.endpoint = type(live.endpoint)(live.endpoint.name, live.endpoint.url, "main", "")
    code, said = await broken.types("restore")
    assert (code, "has no mock that may be broken" in " ".join(said.split())) == (1, True), said
    assert (await broken.types("kill"))[0] == 2


async def test_who_is_no_mock_with_a_door_is_left_alone(broken: Broken) -> None:
    live = broken.home.app.gateway.endpoints.all()[0]
    for labels, why in (
        ({}, "is no mock that may be broken"),
        ({"chaos": "192.0.2.7:9000"}, "names another machine"),
        ({"chaos": "nonsense"}, "is not ADDRESS:PORT"),
        ({"chaos": "127.0.0.1:9"}, "was its mock started with --chaos-port?"),
    ):
        live.endpoint = type(live.endpoint)("a", live.endpoint.url, "main", "", labels=labels)
        code, said = await broken.types("kill", "a")
        assert (code, why in " ".join(said.split())) == (1, True), said
    assert (await broken.types("kill", "nobody"))[0] == 2
    assert (await broken.types("kill", "a", "--for", "soon"))[0] == 2
    assert broken.home.groups[0].faults.spec == ""


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example:80"}],
    ids=["origin", "fetch", "rebound"],
)
async def test_the_door_turns_pages_away(broken: Broken, headers: dict[str, str]) -> None:
    port = broken.home.groups[0].listener.port
    order = {"spec": "refuse"}
    async with broken.home.http.post(f"{broken.door}/faults/{port}", json=order, headers=headers) as answer:
        assert answer.status == 403
    if "Origin" in headers:
        url = broken.home.groups[0].url + "/mock/fault"
        async with broken.home.http.post(url, json=order, headers=headers) as answer:
            assert answer.status == 403
    assert broken.home.groups[0].faults.spec == ""


async def test_the_door_says_what_is_wrong(broken: Broken) -> None:
    port = broken.home.groups[0].listener.port
    for path, body, status in (
        (f"/faults/{port}", {"spec": "explode"}, 400),
        (f"/faults/{port}", {"sp": ""}, 400),
        ("/faults/1", {"spec": ""}, 404),
        (f"/faults/{port}", {"spec": "x" * 5000}, 413),
    ):
        async with broken.home.http.post(broken.door + path, json=body) as answer:
            assert answer.status == status, path
    async with broken.home.http.get(broken.door + "/faults") as answer:
        assert (await answer.json())[str(port)] == {"spec": "", "jobs": 0}


async def test_one_that_is_cut_off_takes_connections_and_answers_nobody_until_it_is_healed(broken: Broken) -> None:
    group = broken.home.groups[0]
    group.faults.set("partition")
    asking = asyncio.create_task(health(broken))
    done, _ = await asyncio.wait([asking], timeout=0.1)
    assert not done
    group.faults.set("")
    assert await asyncio.wait_for(asking, 5) == 200


async def health(broken: Broken) -> int:
    async with broken.home.http.get(broken.home.groups[0].url + "/health") as answer:
        return answer.status
