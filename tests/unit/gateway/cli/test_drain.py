"""Tests of the commands `penstock drain` and `penstock undrain` against a running gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from gateway.cli import main
from tests.command_runner import CommandRunner, Result
from tests.unit.gateway.reload.running import Running, running


async def typed(running_gateway: Running, *words: str) -> Result:
    words = (*words, "--admin", running_gateway.app.admin_url)
    return await asyncio.to_thread(CommandRunner().invoke, main.run, words)


def states(running_gateway: Running) -> dict[str, bool]:
    return {
        live.endpoint.name: live.is_drained for live in running_gateway.app.gateway.endpoints.all()
    }


async def test_drain_stops_requests_to_an_endpoint_until_undrain(tmp_path: Path) -> None:
    async with running(tmp_path) as running_gateway:
        assert (
            await typed(running_gateway, "drain", "group-0")
        ).output == "group-0 is drained; 0 requests in flight\n"
        assert states(running_gateway) == {"group-0": True, "group-1": False}
        for number in range(4):
            assert await running_gateway.ask(f"prompt {number}") == "ok"
        sent = {
            live.endpoint.name: live.sent_tokens
            for live in running_gateway.app.gateway.endpoints.all()
        }
        assert sent["group-0"] == 0
        assert sent["group-1"] > 0
        assert (
            await typed(running_gateway, "undrain", "group-0")
        ).output == "group-0 receives requests again\n"
        assert states(running_gateway) == {"group-0": False, "group-1": False}


async def test_a_wrong_name_lists_the_endpoints(tmp_path: Path) -> None:
    async with running(tmp_path) as running_gateway:
        done = await typed(running_gateway, "drain", "group-7")
        assert done.exit_code == 1
        assert "no endpoint is named 'group-7'; the endpoints are group-0, group-1" in done.output


async def test_drain_waits_for_requests_in_flight(tmp_path: Path) -> None:
    async with running(tmp_path, groups=1, speed=1.0) as running_gateway:
        stream = asyncio.create_task(running_gateway.ask(tokens=100))
        load = running_gateway.app.gateway.endpoints.all()[0].load
        while not load.in_flight:
            await asyncio.sleep(0.01)
        done = await typed(running_gateway, "drain", "group-0", "--wait", "--json")
        assert done.exit_code == 0
        assert json.loads(done.output)["in_flight"] == 0
        assert load.in_flight == 0
        assert await stream == "ok"


async def test_drain_stops_waiting_at_its_timeout(tmp_path: Path) -> None:
    async with running(tmp_path, groups=1, speed=0.01) as running_gateway:
        stream = asyncio.create_task(running_gateway.ask(tokens=100))
        load = running_gateway.app.gateway.endpoints.all()[0].load
        while not load.in_flight:
            await asyncio.sleep(0.01)
        done = await typed(running_gateway, "drain", "group-0", "--wait", "--timeout", "0")
        assert done.exit_code == 1
        assert "group-0 still has 1 requests in flight after 0 s" in done.output
        stream.cancel()
