"""What is discovered comes and leaves as by a reload, and outlives reloads."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.fair_time import PATIENCE_S
from tests.unit.gateway.reload.running import Running, running

HEAD = "    endpoints:\n"


def listing(made: Running, file: Path, *numbers: int) -> None:
    fresh = file.with_suffix(".tmp")
    fresh.write_text("".join(f"- {{url: {made.members[n].url}, name: found-{n}}}\n" for n in numbers))
    fresh.replace(file)


async def serving(made: Running, *names: str) -> None:
    """Until exactly these are in the pool and may be asked, or have left."""
    async with asyncio.timeout(PATIENCE_S):
        while sorted(
            live.endpoint.name for live in made.app.gateway.endpoints.all() if not live.leaving and live.load.available
        ) != sorted(names):
            await asyncio.sleep(0.02)


async def test_endpoints_that_a_file_lists_come_serve_and_leave_under_load(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    async with running(tmp_path, groups=3, more="health: {interval: 100ms}\n") as made:
        listing(made, file, 1)
        text = made.text(0).replace(HEAD, f"    discover: {{file: {file}}}\n{HEAD}") + "health: {interval: 100ms}\n"
        async with made.load(4):
            status, told = await made.put(text)
            assert status == 200, told
            await serving(made, "group-0", "found-1")
            listing(made, file, 1, 2)
            await serving(made, "group-0", "found-1", "found-2")
            listing(made, file, 2)
            await serving(made, "group-0", "found-2")
        first = made.app.gateway.endpoints.found["chat"]
        assert (await made.put(text + "retries: {floor: 5}\n"))[0] == 200
        assert made.app.gateway.endpoints.found["chat"] is first
        await serving(made, "group-0", "found-2")
        assert (await made.put(made.text(0)))[0] == 200
        await serving(made, "group-0")
        assert made.app.gateway.endpoints.found == {}


async def test_a_pool_may_have_nobody_but_those_who_are_found(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    async with running(tmp_path, more="health: {interval: 100ms}\n") as made:
        only = made.text(0).split(HEAD)[0] + f"    discover: {{file: {file}, endpoint: {{max_concurrency: 5}}}}\n"
        status, told = await made.put(only)
        assert status == 200, told
        assert (await made.ask()).startswith("503")
        listing(made, file, 0, 1)
        await serving(made, "found-0", "found-1")
        assert await made.ask() == "ok"
        assert {live.endpoint.max_concurrency for live in made.app.gateway.endpoints.all() if not live.leaving} == {5}


async def test_what_discovery_cannot_be_is_said_with_its_place(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        for part, words in (
            ("{}", "one of dns, file and kubernetes"),
            ("{dns: 'a:1', file: b}", "one of dns, file and kubernetes"),
            ("{dns: nowhere}", "host:port"),
            ("{kubernetes: {service: UPPER}}", "service"),
        ):
            status, told = await made.put(made.text().replace(HEAD, f"    discover: {part}\n{HEAD}"))
            assert status == 400, part
            assert any(words in each["text"] and "discover" in each["path"] for each in told["problems"]), told
