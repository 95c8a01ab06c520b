"""Tests of a gateway that chooses among the data-parallel ranks of one mock engine."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from mockgpu.fleet import run_fleet
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.e2e.event_fleet import EventFleet, event_fleet

TEXT = "The reservoir behind the dam is deep. " * 200
RANKS = 4
PINNED = {"layout": {"dp": RANKS}, "pin_ranks": True}


def blocks(fleet: EventFleet) -> list[int]:
    return [len(group.scheduler.pool.cached_keys()) for group in fleet.groups[0].ranks]


async def test_conversations_return_to_the_rank_that_has_them_and_its_events_are_exact() -> None:
    async with event_fleet(ranks=RANKS, endpoint=PINNED) as fleet:
        await fleet.until(lambda: all(fleet.is_exact(rank) for rank in range(RANKS)))
        for _ in range(3):
            for part in range(8):
                await fleet.ask(f"{part} {TEXT}")
        await fleet.until(lambda: all(fleet.is_current(rank) for rank in range(RANKS)))
        own = blocks(fleet)
        await fleet.until(lambda: [len(fleet.index(rank)) for rank in range(RANKS)] == own)
        prompt = max(own) / max(1, round(max(own) / 119))
        assert sum(own) < 8 * 1.1 * prompt  # no prompt was computed by two ranks
        assert sum(count > 0 for count in own) > 1
        assert all(fleet.events(rank).errors == 0 for rank in range(RANKS))


async def test_each_rank_is_shown_with_its_own_load() -> None:
    async with event_fleet(ranks=RANKS, endpoint=PINNED) as fleet:
        rows = await fleet.endpoints()
        assert [row["rank"] for row in rows] == list(range(RANKS))
        assert len({row["name"] for row in rows}) == RANKS
        assert len({row["url"] for row in rows}) == 1


async def test_without_pinning_a_prefix_counts_as_the_mean_over_the_ranks() -> None:
    async with event_fleet(ranks=2, endpoint={"layout": {"dp": 2}}) as fleet:
        await fleet.until(fleet.is_exact)
        assert len(fleet.events(0).sources) == 2
        await fleet.ask(TEXT)
        await fleet.ask(TEXT)
        await fleet.until(lambda: len(fleet.exact.prompts) > 0)
        assert all(blocks(fleet)), "the engine gave each rank one of the two requests"
        sources = fleet.events(0).sources
        await fleet.until(lambda: [len(source.blocks) for source in sources] == blocks(fleet))


@pytest.mark.parametrize(("rank", "status"), [("1", 200), ("7", 400), ("x", 200)])
async def test_the_mock_serves_the_rank_that_the_header_names(rank: str, status: int) -> None:
    async with event_fleet(ranks=2, endpoint={"layout": {"dp": 2}}) as fleet:
        url, body = fleet.groups[0].url, {"model": "demo-8b", "prompt": TEXT, "max_tokens": 4}
        headers = {"x-data-parallel-rank": rank}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{url}/v1/completions", json=body) as response,
        ):
            assert response.status == status
        if rank == "1":
            assert blocks(fleet)[0] == 0
            assert blocks(fleet)[1] > 0


async def test_ranks_in_lockstep_serve_requests_and_fail_and_return_together() -> None:
    spec = GroupSpec(
        *("deepseek-v3", model_named("deepseek-v3"), gpu_named("h200"), 1),
        speed=20.0,
        ep=4,
        ranks=4,
        kv_tokens=50_000,
    )
    body = {"model": "deepseek-v3", "prompt": TEXT, "max_tokens": 4}
    async with run_fleet([spec]) as groups, aiohttp.ClientSession(groups[0].url) as http:

        async def ask(rank: int) -> int:
            headers = {"x-data-parallel-rank": str(rank)}
            async with http.post("/v1/completions", json=body, headers=headers) as response:
                return response.status

        assert await asyncio.gather(*map(ask, range(4))) == [200] * 4
        assert all(group.scheduler.pool.cached_keys() for group in groups[0].ranks)
        groups[0].faults.apply("lost-rank")
        assert await asyncio.gather(*map(ask, range(4))) == [500] * 4
        async with http.get("/health") as response:
            assert response.status == 503
        groups[0].faults.clear()
        assert await asyncio.gather(*map(ask, range(4))) == [200] * 4
