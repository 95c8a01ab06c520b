"""Tests of KV transfers between two agents, over every transport: all bytes arrive, and in time."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.protocol.outcomes import EndReason, OutcomeKind
from tests.contract.kvtransfer.agent_pairs import shaped, soon
from tests.contract.kvtransfer.groups import SMALL, Cache, groups, until
from tests.contract.kvtransfer.links import TRANSPORTS, kind_of

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)
MLA = KvLayout(
    layers=4, kv_heads=1, head_dim=24, dtype=KvDtype.BF16, block_tokens=16, tp=4, mla=True
)


def blocks_for(layout: KvLayout, tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(32)[: -(-tokens // layout.block_tokens)].tolist()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (shaped(tp=4), shaped(tp=2)),
        (shaped(tp=2), shaped(tp=4)),
        (shaped(tp=8), shaped(tp=8)),
        (shaped(tp=1), shaped(tp=8)),
        (shaped(kv_heads=2, tp=4), shaped(kv_heads=2, tp=2)),
        (shaped(tp=2, pp=2), shaped(tp=4, pp=1)),
        (shaped(block_tokens=16), shaped(block_tokens=32)),
        (shaped(block_tokens=64), shaped(block_tokens=16, tp=4)),
        (shaped(order=KvOrder.BLNHC), shaped(order=KvOrder.BLHNC, tp=4)),
        (MLA, shaped(MLA, tp=2)),
        (MLA, shaped(MLA, tp=8, block_tokens=32)),
    ],
    ids=lambda layout: (
        f"tp{layout.tp}pp{layout.pp}b{layout.block_tokens}{layout.order}{'mla' if layout.mla else ''}"
    ),
)
async def test_every_byte_arrives_in_its_place(
    transport: str, src: KvLayout, dst: KvLayout
) -> None:
    tokens = 75
    cache = Cache(src, tokens, seed=3)
    async with groups(transport, src, dst) as (source, sink):
        out_of, into = blocks_for(src, tokens, 1), blocks_for(dst, tokens, 2)
        cache.write(src, source.regions, out_of)
        offer = source.agent.offer("r", out_of, tokens)
        landing = sink.agent.fetch(source.agent.address, "r", into, tokens, ticket=offer.ticket)
        end = await soon(landing.wait_ended())
        assert (end.kind, end.reason, end.transport) == (
            OutcomeKind.LANDED,
            EndReason.LANDED,
            kind_of(transport),
        )
        assert (await soon(offer.wait_ended())).kind is OutcomeKind.LANDED
        assert cache.differs(dst, sink.regions, into) == 0
        assert landing.layers == src.layers


LAYERS_FIRST = shaped(order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=32)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (LAYERS_FIRST, LAYERS_FIRST),
        (shaped(LAYERS_FIRST, tp=2), shaped(LAYERS_FIRST, tp=1)),
        (shaped(LAYERS_FIRST, order=KvOrder.LBNHC, content=KvContent.TOKENS), SMALL),
        (SMALL, shaped(LAYERS_FIRST, order=KvOrder.BHLNC, content=KvContent.TOKENS)),
    ],
)
async def test_caches_with_layers_outermost_move_and_their_blocks_are_fenced(
    transport: str, src: KvLayout, dst: KvLayout
) -> None:
    if kind_of(transport) in ("rdma", "shm"):
        pytest.skip("an agent with this transport refuses these layouts")
    tokens = 75
    cache, other = Cache(src, tokens, seed=3), Cache(src, tokens, seed=4)
    async with groups(transport, src, dst) as (source, sink):
        out_of, into = blocks_for(src, tokens, 1), blocks_for(dst, tokens, 2)
        cache.write(src, source.regions, out_of)
        offer = source.agent.offer("r", out_of, tokens)
        landing = sink.agent.fetch(source.agent.address, "r", into, tokens, ticket=offer.ticket)
        assert (await soon(landing.wait_ended())).has_landed
        assert cache.differs(dst, sink.regions, into) == 0
        source.agent.offer("s", out_of, tokens, public=True)
        for region in source.regions:
            region.bump(out_of[-1:])
        other.write(src, source.regions, out_of)
        landing = sink.agent.fetch(source.agent.address, "s", into, tokens)
        assert (await soon(landing.wait_ended())).reason is EndReason.STALE


async def test_blocks_that_were_not_reserved_stay_as_they_are(transport: str) -> None:
    async with groups(transport, SMALL, shaped(tp=4)) as (source, sink):
        for region in (*source.regions, *sink.regions):
            region.bytes[:] = 0xAA
        into = [3, 7, 5]
        offer = source.agent.offer("r", [1, 2, 3], 48)
        for region in source.regions:
            region.bytes[:] = 0x55
        assert (
            await soon(
                sink.agent.fetch(
                    source.agent.address, "r", into, 48, ticket=offer.ticket
                ).wait_ended()
            )
        ).has_landed
        for region in sink.regions:
            by_block = region.bytes.reshape(32, -1)
            assert (by_block[into] == 0x55).all()
            assert (np.delete(by_block, into, axis=0) == 0xAA).all()


async def test_an_invitation_waits_for_its_offer(transport: str) -> None:
    cache = Cache(SMALL, 40, seed=9)
    async with groups(transport, SMALL, SMALL) as (source, sink):
        landing = sink.agent.fetch(source.agent.address, "later", [4, 5, 6], 40)
        await until(
            lambda: source.agent.stats()["leases"]["waiting_invitations"],
            "the invitation did not come",
        )
        cache.write(SMALL, source.regions, [1, 2, 3])
        offer = source.agent.offer("later", [1, 2, 3], 40, public=True)
        assert (await soon(landing.wait_ended())).has_landed
        assert (await soon(offer.wait_ended())).has_landed
        assert cache.differs(SMALL, sink.regions, [4, 5, 6]) == 0


async def test_layers_are_sent_as_they_are_computed(transport: str) -> None:
    layout = shaped(layers=4, head_dim=64, tp=1, kv_heads=32, block_tokens=128)
    cache = Cache(layout, 32, seed=5)
    tokens = 6 * 128
    async with groups(transport, layout, layout) as (source, sink):
        cache.write(layout, source.regions, [0])
        offer = source.agent.offer("r", range(6), tokens, ready_layers=0)
        landing = sink.agent.fetch(
            source.agent.address, "r", range(10, 16), tokens, ticket=offer.ticket
        )
        observations = []
        for layer in range(1, 5):
            offer.mark_ready(layer)
            # With one-sided writes no progress is reported before the fence.
            assert transport == "rdma" or await soon(landing.wait_layers(layer)), landing.outcome
            observations.append(landing.layers)
        assert (await soon(landing.wait_ended())).has_landed
        assert landing.layers == 4
        assert observations == ([0] * 4 if transport == "rdma" else [1, 2, 3, 4])
        assert cache.differs(layout, sink.regions, [10]) == 0


async def test_tokens_that_are_there_already_are_not_touched(transport: str) -> None:
    cache = Cache(SMALL, 64, seed=6)
    async with groups(transport, SMALL, shaped(tp=4)) as (source, sink):
        cache.write(SMALL, source.regions, [9, 8, 7, 6])
        offer = source.agent.offer("r", [9, 8, 7, 6], 64)
        landing = sink.agent.fetch(
            source.agent.address, "r", [0, 1, 2, 3], 64, ticket=offer.ticket, skip_tokens=32
        )
        assert (await soon(landing.wait_ended())).has_landed
        assert cache.differs(shaped(tp=4), sink.regions, [0, 1, 2, 3], skip=32) == 0
        assert not any(region.bytes.reshape(32, -1)[:2].any() for region in sink.regions)


async def test_an_agent_fetches_from_itself(transport: str) -> None:
    cache = Cache(SMALL, 32, seed=7)
    async with groups(transport, SMALL) as (alone,):
        cache.write(SMALL, alone.regions, [0, 1])
        offer = alone.agent.offer("r", [0, 1], 32)
        landing = alone.agent.fetch(alone.agent.address, "r", [20, 21], 32, ticket=offer.ticket)
        assert (await soon(landing.wait_ended())).has_landed
        assert (await soon(offer.wait_ended())).has_landed
        assert cache.differs(SMALL, alone.regions, [20, 21]) == 0


async def test_a_hundred_at_once_all_land_over_one_link(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        for region in source.regions:
            region.bytes.reshape(32, -1)[:] = np.arange(32, dtype=np.uint8)[:, None]
        offers = [
            source.agent.offer(f"r{index}", [index % 16], 16, public=True) for index in range(100)
        ]
        landings = [
            sink.agent.fetch(
                source.agent.address,
                f"r{index}",
                [16 + index % 16],
                16,
                priority=("interactive", "bulk")[index % 2],
            )
            for index in range(100)
        ]
        ends = [await soon(transfer.wait_ended()) for transfer in (*landings, *offers)]
        assert {end.reason for end in ends} == {EndReason.LANDED}
        assert sink.agent.stats()["links"] == 1
        for region in sink.regions:
            by_block = region.bytes.reshape(32, -1)
            assert (by_block[16:] == np.arange(16, dtype=np.uint8)[:, None]).all()


async def test_invalid_arguments_are_refused_at_once(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        for blocks, tokens in (([0], 17), ([32], 16), ([-1], 16), ([0], 0), ([], 1)):
            with pytest.raises(ValueError, match=r"block|token"):
                source.agent.offer("r", blocks, tokens)
            with pytest.raises(ValueError, match=r"block|token"):
                sink.agent.fetch(source.agent.address, "r", blocks, tokens)
        with pytest.raises(ValueError, match="twice"):
            sink.agent.fetch(source.agent.address, "r", [1, 1], 32)
        for seconds in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="of an offer must be a finite"):
                source.agent.offer("r", [0], 16, ttl_s=seconds)
            with pytest.raises(ValueError, match="of a landing must be a finite"):
                sink.agent.fetch(source.agent.address, "r", [1], 16, timeout_s=seconds)
        with pytest.raises(
            ValueError, match="priority must be one of interactive, bulk, migration, not 'urgent'"
        ):
            sink.agent.fetch(source.agent.address, "r", [1], 16, priority="urgent")
        offer = source.agent.offer("r", [0], 16)
        with pytest.raises(ValueError, match="of an offer must be a finite"):
            offer.renew(float("nan"))
        with pytest.raises(ValueError, match="already"):
            source.agent.offer("r", [0], 16)


async def test_stats_count_moved_bytes_by_peer(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16)
        await soon(
            sink.agent.fetch(source.agent.address, "r", [5], 16, ticket=offer.ticket).wait_ended()
        )
        await soon(offer.wait_ended())
        figures = sink.agent.stats()
        assert figures["moved_bytes"] == {("p0", kind_of(transport)): SMALL.bytes_per_token * 16}
        assert figures["landings"] == {("landed", "landed"): 1}
        assert source.agent.stats()["offers"] == {("landed", "landed"): 1}


async def test_closed_agents_leave_neither_threads_nor_descriptors(transport: str) -> None:
    await _one_life(transport)  # created once and reused
    threads, descriptors = set(threading.enumerate()), _descriptors()
    for _ in range(3):
        await _one_life(transport)
    await until(
        lambda: not [transfer for transfer in _transfer_threads() - threads if transfer.is_alive()],
        "threads are left",
    )
    await until(lambda: _descriptors() <= descriptors, "descriptors are left open")


async def _one_life(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16)
        await soon(
            sink.agent.fetch(source.agent.address, "r", [5], 16, ticket=offer.ticket).wait_ended()
        )
        regions = [*source.regions, *sink.regions]
    for region in regions:
        region.close()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _transfer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv-")}
