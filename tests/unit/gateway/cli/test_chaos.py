"""Tests that faults can be injected into mock engines only by local programs, never by web
pages.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.cli import main
from gateway.fleet.endpoint_from_config import to_endpoint
from mockgpu.chaos_server import run_chaos_server
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.command_runner import CommandRunner
from tests.duration_limits import PATIENCE_S, Stopwatch


class Broken:
    def __init__(self, fleet: GatewayFleet, fault_port: int) -> None:
        self.fleet = fleet
        self.door = f"http://127.0.0.1:{fault_port}"

    async def types(self, *words: str) -> tuple[int, str]:
        def run() -> tuple[int, str]:
            done = CommandRunner().invoke(
                main.run, ["chaos", *words, "--admin", self.fleet.app.admin_url]
            )
            return done.exit_code, done.output

        return await asyncio.to_thread(run)


@pytest.fixture
async def broken() -> AsyncIterator[Broken]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(gateway_fleet(2))
        port = await stack.enter_async_context(run_chaos_server(fleet.groups, 0))
        checker: Any = fleet.app._health_checker
        # Prevent rebuilds for changed model lists: they would undo the new names of the endpoints.
        checker._model_lists._report = lambda: None
        for name, live in zip("ab", fleet.app.gateway.endpoints.all(), strict=True):
            spec = live.spec.model_copy(
                update={"name": name, "labels": {"chaos": f"127.0.0.1:{port}"}}
            )
            live.endpoint = to_endpoint("main", spec)
        yield Broken(fleet, port)


async def test_kill_and_restore_report_what_the_gateway_does(broken: Broken) -> None:
    took = Stopwatch()
    code, output = await broken.types("kill", "b")
    without_cpu_s = took.wall_s - took.fair_s
    assert code == 0
    assert "killed b (http://127.0.0.1:" in output
    noticed = re.search(r"the gateway took it out of rotation after (\d+\.\d) s ", output)
    assert noticed, output
    assert float(noticed[1]) - without_cpu_s < 2.0
    assert "1 of 2 endpoints serve" in output
    assert (await broken.fleet.ask()).fate == "ok"
    code, output = await broken.types("restore")
    assert code == 0
    assert "restored b (" in output
    assert "restored a" not in output
    assert "2 of 2 endpoints serve" in output
    assert (await broken.types("restore"))[1] == "no mock TP group has a fault\n"


async def test_actions_set_faults_of_the_mock(broken: Broken) -> None:
    code, output = await broken.types("slow", "a", "--factor", "3", "--for", "250ms", "--json")
    reply: dict[str, Any] = json.loads(output)
    assert (code, reply["spec"], reply["targets"][0]["name"]) == (0, "slow:x=3@0-0.25", "a")
    assert broken.fleet.groups[0].faults.spec == "slow:x=3@0-0.25"
    code, output = await broken.types("lose-rank", "a", "--rank", "0")
    assert (code, "took a GPU from a" in output, "(engine_dead)" in output) == (0, True, True)


async def test_restore_without_mocks_is_an_error(broken: Broken) -> None:
    for live in broken.fleet.app.gateway.endpoints.all():
        live.endpoint = type(live.endpoint)(live.endpoint.name, live.endpoint.url, "main", "")
    code, output = await broken.types("restore")
    assert (code, "no endpoint accepts faults" in " ".join(output.split())) == (1, True), output
    assert (await broken.types("kill"))[0] == 2


async def test_endpoints_without_a_local_fault_server_are_refused(broken: Broken) -> None:
    live = broken.fleet.app.gateway.endpoints.all()[0]
    for labels, message in (
        ({}, "does not accept faults"),
        ({"chaos": "192.0.2.7:9000"}, "is an address of another machine"),
        ({"chaos": "nonsense"}, "is not ADDRESS:PORT"),
        ({"chaos": "127.0.0.1:9"}, "was its mock started with --chaos-port?"),
    ):
        live.endpoint = type(live.endpoint)("a", live.endpoint.url, "main", "", labels=labels)
        code, output = await broken.types("kill", "a")
        assert (code, message in " ".join(output.split())) == (1, True), output
    assert (await broken.types("kill", "nobody"))[0] == 2
    assert (await broken.types("kill", "a", "--for", "soon"))[0] == 2
    assert broken.fleet.groups[0].faults.spec == ""


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example:80"},
    ],
    ids=["origin", "fetch", "rebound"],
)
async def test_the_fault_server_refuses_web_pages(broken: Broken, headers: dict[str, str]) -> None:
    port = broken.fleet.groups[0].listener.port
    order = {"spec": "refuse"}
    async with broken.fleet.http.post(
        f"{broken.door}/faults/{port}", json=order, headers=headers
    ) as response:
        assert response.status == 403
    if "Origin" in headers:
        url = broken.fleet.groups[0].url + "/mock/fault"
        async with broken.fleet.http.post(url, json=order, headers=headers) as response:
            assert response.status == 403
    assert broken.fleet.groups[0].faults.spec == ""


async def test_the_fault_server_reports_invalid_requests(broken: Broken) -> None:
    port = broken.fleet.groups[0].listener.port
    for path, body, status in (
        (f"/faults/{port}", {"spec": "explode"}, 400),
        (f"/faults/{port}", {"sp": ""}, 400),
        ("/faults/1", {"spec": ""}, 404),
        (f"/faults/{port}", {"spec": "x" * 5000}, 413),
    ):
        async with broken.fleet.http.post(broken.door + path, json=body) as response:
            assert response.status == status, path
    async with broken.fleet.http.get(broken.door + "/faults") as response:
        assert (await response.json())[str(port)] == {"spec": "", "jobs": 0}


async def test_a_partitioned_mock_accepts_connections_and_does_not_respond(broken: Broken) -> None:
    group = broken.fleet.groups[0]
    group.faults.apply("partition")
    request = asyncio.create_task(health(broken))
    done, _ = await asyncio.wait([request], timeout=0.1)
    assert not done
    group.faults.apply("")
    assert await asyncio.wait_for(request, PATIENCE_S) == 200


async def health(broken: Broken) -> int:
    async with broken.fleet.http.get(broken.fleet.groups[0].url + "/health") as response:
        return response.status
