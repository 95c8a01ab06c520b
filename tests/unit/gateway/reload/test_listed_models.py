"""Tests that a reload with a mistyped model name is refused if the model is served now."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway.reload.reloader import ChangeOptions
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

MISTYPED = ("pool: chat", "pool: chat, served_model: demo-8c")


async def lists_are_read(harness: Running) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not all(live.has_list for live in harness.app.gateway.endpoints.all()):
            await asyncio.sleep(0.01)


async def state(harness: Running) -> dict[str, Any]:
    async with harness.http.get(harness.app.admin_url + "/config") as answer:
        reply: dict[str, Any] = await answer.json()
        return reply


async def test_a_mistyped_name_of_a_served_model_is_refused_and_can_be_forced(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        await lists_are_read(harness)
        harness.write(harness.text().replace(*MISTYPED))
        await harness.hears("rejected gateway.yaml:")
        (line,) = harness.said
        assert "lists 'demo-8c' for the model 'demo-8b'; listed there: 'demo-8b'." in line
        assert "It is served now; `penstock reload --force` applies the change" in line
        assert "demo-8b" in harness.app.gateway.snapshot.routes
        forced = await harness.app.reloader.reload("admin", ChangeOptions(force=True))
        assert forced.result == "applied"
        assert "demo-8b" in harness.app.gateway.snapshot.unlisted


async def test_a_new_model_that_no_engine_lists_yet_is_accepted(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        await lists_are_read(harness)
        line = next(line for line in harness.text().splitlines() if "pool: chat" in line)
        more = line.replace("demo-8b", "demo-9b")
        harness.write(harness.text().replace(line, f"{line}\n{more}"))
        await harness.hears("reloaded gateway.yaml v2")
        assert "demo-9b" in harness.app.gateway.snapshot.unlisted


async def test_the_state_names_models_without_an_available_endpoint(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        await lists_are_read(harness)
        assert (await state(harness))["unserved"] == {}
        table = harness.app.gateway.endpoints
        for live in table.all():
            table.set_drained(live, is_drained=True)
        assert (await state(harness))["unserved"] == {"demo-8b": "no endpoint is available"}
