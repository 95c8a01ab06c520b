"""Tests that a change that is planned over many turns is applied in one of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.app import App
from gateway.util import work_in_turns
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.reload.running import running

LEAST = ("policy: prefix_aware", "policy: least_loaded")

Seen = tuple[int, str, tuple[str, ...], tuple[str, ...], int, float]


def what_a_request_sees(app: App) -> Seen:
    # Return what decides how a request is served: its route, the endpoints, places and timeouts.
    snapshot, table = app.gateway.snapshot, app.gateway.endpoints
    route = snapshot.routes["demo-8b"]
    return (
        snapshot.generation,
        route.policy.name,
        tuple(candidate.endpoint.name for candidate in route.candidates),
        tuple(live.endpoint.name for live in table.all() if not live.is_leaving),
        route.pool_queue.places,
        min(live.upstream.timeouts.stall_s for live in table.all() if not live.is_leaving),
    )


async def test_in_every_turn_a_request_sees_the_whole_change_or_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_in_turns, "ITEMS_PER_TURN", 1)  # a turn for every endpoint
    async with running(tmp_path, groups=6, speed=200) as harness:
        app, seen, turns = harness.app, dict[Seen, None](), 0

        async def watch() -> None:
            nonlocal turns
            while True:
                seen[what_a_request_sees(app)] = None
                turns += 1
                await asyncio.sleep(0)

        before = what_a_request_sees(app)
        watcher = asyncio.create_task(watch())
        text = harness.text(2, 3, 4, 5).replace(*LEAST).replace("stall: 60s", "stall: 55s")
        async with harness.load(users=4):
            async with asyncio.timeout(PATIENCE_S):
                assert (await harness.put(text))[1]["result"] == "applied"
            assert await harness.ask() == "ok"
        watcher.cancel()
        after = what_a_request_sees(app)
        assert (after[1], len(after[2]), after[5]) == ("least_loaded", 4, 55.0)
        assert list(seen) == [before, after]
        assert turns > 20


async def test_changes_wait_for_each_other_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_in_turns, "ITEMS_PER_TURN", 1)
    async with running(tmp_path, groups=3) as harness:
        app = harness.app
        generation = app.gateway.snapshot.generation
        rebuilds = [asyncio.create_task(app.swap.rebuild()) for _ in range(3)]
        news = app.swap.rebuild_after_model_news()
        assert (await harness.put(harness.text(0, 1).replace(*LEAST)))[0] == 200
        await asyncio.gather(*rebuilds, news)
        assert app.gateway.snapshot.generation == generation + 4, "the news changed no route"
        assert app.gateway.snapshot.policies["chat"].name == "least_loaded"
        async with asyncio.timeout(PATIENCE_S):
            while app.swap.retiring:
                await asyncio.sleep(0.01)
        assert [live.endpoint.name for live in app.gateway.endpoints.all()] == [
            *("group-0", "group-1"),
        ]
        assert await harness.ask() == "ok"
