"""Tests of engines with one KV transfer agent per rank (GPU).

All bytes arrive, and an offer ends on all ranks together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from msgspec.structs import replace

from kvtransfer.agent import Agent
from kvtransfer.layout.kv_layout import KvContent, KvLayout, KvOrder
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import source_ranks
from kvtransfer.protocol.outcomes import EndReason, OutcomeKind, TransferOutcome
from kvtransfer.protocol.ticket import mint_ahead
from kvtransfer.transfer.handles import Landing, Offer
from kvtransfer.transports.inproc import InprocWire
from kvtransfer.util.clock import ThreadClock
from tests.contract.kvtransfer.groups import KEY, PATIENT, SMALL, Cache, memory, until
from tests.contract.kvtransfer.links import PATIENCE_S, TRANSPORTS, kind_of, make

NONCE = b"n" * 16
TOKENS = 75
MLA = KvLayout(4, kv_heads=1, head_dim=24, dtype=SMALL.dtype, block_tokens=16, tp=4, mla=True)
VLLM = replace(SMALL, order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=32)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class RankGroup:
    def __init__(self, name: str, layout: KvLayout, ways: Sequence[object]) -> None:
        self.layout, self.regions = layout, memory(layout, 32, name)
        self.agents = [
            self._agent(name, rank, region, way)
            for rank, (region, way) in enumerate(zip(self.regions, ways, strict=True))
        ]

    def _agent(self, name: str, rank: int, region: Region, way: object) -> Agent:
        return Agent(
            f"{name}.{rank}", self.layout, [region], key=KEY, transports=[way],  # type: ignore[list-item]
            options=PATIENT, rank=rank, group=name,
        )  # fmt: skip

    def offer(self, blocks: Sequence[int], name: str = "r") -> list[Offer]:
        return [agent.offer(name, blocks, TOKENS, nonce=NONCE) for agent in self.agents]

    def tickets(self, name: str = "r") -> list[str]:
        return [
            mint_ahead(KEY, name, agent.name, agent.epoch, NONCE, 1e12) for agent in self.agents
        ]

    def fetch(
        self, source: RankGroup, blocks: Sequence[int], ranks: Sequence[int] | None = None
    ) -> list[Landing]:
        tickets = source.tickets()
        return [
            self.agents[rank].fetch(
                source.agents[other].address, "r", blocks, TOKENS, ticket=tickets[other]
            )
            for rank in (range(self.layout.ranks) if ranks is None else ranks)
            for other in source_ranks(source.layout, self.layout, rank)
        ]

    @property
    def held(self) -> int:
        figures = [agent.stats() for agent in self.agents]
        return sum(
            sum(one["leases"].values()) + sum(one["reservations"].values()) for one in figures
        )


@asynccontextmanager
async def rank_groups(transport: str, *layouts: KvLayout) -> AsyncIterator[list[RankGroup]]:
    clock = ThreadClock()
    wire = InprocWire(clock)
    built = []
    async with AsyncExitStack() as stack:
        stack.callback(clock.close)
        for index, layout in enumerate(layouts):
            ways = [make(transport, wire) for _ in range(layout.ranks)]
            built.append(RankGroup(f"g{index}", layout, ways))
            for region in built[-1].regions:
                stack.callback(region.close)
            for agent in built[-1].agents:
                await agent.start()
                stack.push_async_callback(agent.close)
        yield built
    assert [group.held for group in built] == [0] * len(built)


async def all_ended(handles: Sequence[Offer | Landing]) -> list[TransferOutcome]:
    async with asyncio.timeout(PATIENCE_S):
        return list(await asyncio.gather(*(handle.wait_ended() for handle in handles)))


def reasons(outcomes: Sequence[TransferOutcome]) -> set[EndReason]:
    return {outcome.reason for outcome in outcomes}


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (SMALL, replace(SMALL, tp=1)),
        (replace(SMALL, tp=1), SMALL),
        (SMALL, replace(SMALL, tp=4)),
        (replace(SMALL, tp=4), SMALL),
        (SMALL, SMALL),
        (replace(SMALL, kv_heads=2, tp=4), replace(SMALL, kv_heads=2, tp=2)),
        (replace(SMALL, kv_heads=2, tp=2), replace(SMALL, kv_heads=2, tp=4)),
        (replace(SMALL, tp=1, pp=2), SMALL),
        (SMALL, replace(SMALL, block_tokens=32, tp=1)),
        (MLA, replace(MLA, tp=2)),
        (replace(MLA, tp=1), MLA),
        (VLLM, replace(VLLM, tp=1)),
        (replace(VLLM, tp=1), replace(VLLM, tp=4)),
    ],
    ids=lambda layout: f"tp{layout.tp}pp{layout.pp}h{layout.kv_heads}{layout.order}",
)
async def test_every_rank_gets_its_bytes_from_the_ranks_that_have_them(
    transport: str, src: KvLayout, dst: KvLayout
) -> None:
    if kind_of(transport) in ("rdma", "shm") and not src.order.is_block_outermost:
        pytest.skip("an agent with this transport refuses this layout")
    cache = Cache(src, TOKENS, seed=3)
    async with rank_groups(transport, src, dst) as (source, sink):
        out_of, into = list(range(1, 6)), list(range(20, 25))
        cache.write(src, source.regions, out_of)
        offers = source.offer(out_of)
        landings = sink.fetch(source, into)
        assert reasons(await all_ended(landings)) == {EndReason.LANDED}
        assert cache.differs(dst, sink.regions, into) == 0
        needed = {other for rank in range(dst.ranks) for other in source_ranks(src, dst, rank)}
        for rank, offer in enumerate(offers):
            if rank not in needed:
                offer.revoke("no rank needs it")
        outcomes = await all_ended(offers)
        assert {outcomes[rank].reason for rank in needed} == {EndReason.LANDED}


async def test_ranks_may_ask_before_the_offer_is_made(transport: str) -> None:
    cache = Cache(SMALL, TOKENS, seed=3)
    dst = replace(SMALL, tp=4)
    async with rank_groups(transport, SMALL, dst) as (source, sink):
        landings = sink.fetch(source, range(20, 25))
        await until(
            lambda: sum(a.stats()["leases"]["waiting_invitations"] for a in source.agents) == 4
        )
        cache.write(SMALL, source.regions, range(1, 6))
        offers = source.offer(range(1, 6))
        assert reasons(await all_ended([*landings, *offers])) == {EndReason.LANDED}
        assert cache.differs(dst, sink.regions, range(20, 25)) == 0


async def test_an_offer_stays_until_its_last_rank_has_fetched(transport: str) -> None:
    async with rank_groups(transport, replace(SMALL, tp=1), SMALL) as (source, sink):
        (offer,) = source.offer(range(1, 6))
        assert reasons(await all_ended(sink.fetch(source, range(20, 25), [0]))) == {
            EndReason.LANDED
        }
        assert offer.outcome is None
        generations = source.regions[0].generations_of([1, 2, 3, 4, 5]).tolist()
        assert reasons(await all_ended(sink.fetch(source, range(20, 25), [0]))) == {
            EndReason.TICKET_SPENT
        }
        assert reasons(await all_ended(sink.fetch(source, range(20, 25), [1]))) == {
            EndReason.LANDED
        }
        (end,) = await all_ended([offer])
        assert (end.reason, end.n_bytes > 0) == (EndReason.LANDED, True)
        after = source.regions[0].generations_of([1, 2, 3, 4, 5]).tolist()
        assert after == [generation + 1 for generation in generations]


async def test_ranks_of_two_groups_cannot_share_an_offer(transport: str) -> None:
    layouts = (replace(SMALL, tp=1), SMALL, SMALL)
    async with rank_groups(transport, *layouts) as (source, sink, other):
        (offer,) = source.offer(range(1, 6))
        assert reasons(await all_ended(sink.fetch(source, range(20, 25), [0]))) == {
            EndReason.LANDED
        }
        assert reasons(await all_ended(other.fetch(source, range(20, 25), [1]))) == {
            EndReason.NAME_TAKEN
        }
        offer.revoke()
        assert (await all_ended([offer]))[0].kind is OutcomeKind.CANCELLED


async def test_a_rank_that_gives_up_ends_the_offer_for_all_ranks(transport: str) -> None:
    async with rank_groups(transport, replace(SMALL, tp=1), SMALL) as (source, sink):
        offer = source.agents[0].offer("r", range(1, 6), TOKENS, nonce=NONCE, ready_layers=0)
        first, second = sink.fetch(source, range(20, 25))
        await until(lambda: source.agents[0].stats()["leases"]["claimed"] == 3)
        first.cancel()
        assert reasons(await all_ended([first, second, offer])) == {EndReason.CANCELLED}


async def test_a_lost_rank_of_the_sink_ends_the_offer(transport: str) -> None:
    async with rank_groups(transport, replace(SMALL, tp=1), SMALL) as (source, sink):
        offer = source.agents[0].offer("r", range(1, 6), TOKENS, nonce=NONCE, ready_layers=0)
        _, second = sink.fetch(source, range(20, 25))
        await until(lambda: source.agents[0].stats()["leases"]["claimed"] == 3)
        await sink.agents[0].close()
        (end,) = await all_ended([offer])
        assert end.kind is not OutcomeKind.LANDED
        assert not (await all_ended([second]))[0].has_landed


async def test_a_lost_rank_of_the_source_ends_the_offers_of_its_group(transport: str) -> None:
    async with rank_groups(transport, SMALL) as (source,):
        first, second = source.agents
        first.join_group([second.address])
        second.join_group([first.address])
        offers = source.offer(range(1, 6))
        await until(lambda: all(agent.stats()["links"] == 2 for agent in source.agents))
        assert [offer.outcome for offer in offers] == [None, None]
        await second.close()
        (end,) = await all_ended([offers[0]])
        assert (end.reason, end.kind, end.is_retriable) == (
            EndReason.RANK_LOST,
            OutcomeKind.FAILED,
            True,
        )
        later = first.offer("s", [1], 16)
        assert (await all_ended([later]))[0].reason is EndReason.RANK_LOST
        first.join_group([])
        alone = first.offer("t", [1], 16)
        assert alone.outcome is None
        alone.revoke()
        await all_ended([alone])


async def test_a_rank_that_cannot_be_reached_ends_the_offers_of_its_group(transport: str) -> None:
    async with rank_groups(transport, SMALL) as (source,):
        first, second = source.agents
        address = second.address
        await second.close()
        offer = first.offer("r", [1], 16)
        first.join_group([address])
        assert (await all_ended([offer]))[0].reason is EndReason.RANK_LOST
