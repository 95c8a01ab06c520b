"""Tests of a gateway in front of a mock engine with data-parallel ranks, each of which can be
routed to.
"""

from __future__ import annotations

import aiohttp
import pytest

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
