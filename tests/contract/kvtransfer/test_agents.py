"""KV transfers between two agents, over every transport: complete, or ended with a reason."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import msgspec
import numpy as np
import pytest

from kvtransfer.layout.layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.protocol.outcomes import EndReason, OutcomeKind
from tests.contract.kvtransfer.groups import PATIENT, SMALL, Cache, Group, groups, until
from tests.contract.kvtransfer.links import PATIENCE_S, TRANSPORTS, kind_of

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)

MLA = KvLayout(
    layers=4, kv_heads=1, head_dim=24, dtype=KvDtype.BF16, block_tokens=16, tp=4, mla=True
)


def shaped(layout: KvLayout = SMALL, **changes: object) -> KvLayout:
    return msgspec.structs.replace(layout, **changes)


async def soon(awaitable):  # type: ignore[no-untyped-def]
    return await asyncio.wait_for(awaitable, PATIENCE_S)


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
    """With this layout, a window (batch of bytes) depends on every block of its offer."""
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
    """Some of them share blocks, as requests with a common prefix do."""
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

            # ---- refused, with a reason, before a byte moves


async def refused(
    source: Group, sink: Group, name: str, ticket: str | None, tokens: int = 16
) -> EndReason:
    before = sink.snapshot()
    landing = sink.agent.fetch(
        source.agent.address, name, [1, 2], tokens, ticket=ticket, timeout_s=PATIENCE_S
    )
    end = await asyncio.wait_for(landing.wait_ended(), 2 * PATIENCE_S)
    assert end.kind in (OutcomeKind.FAILED, OutcomeKind.EXPIRED)
    assert end.n_bytes == 0
    assert all(np.array_equal(was, now) for was, now in zip(before, sink.snapshot(), strict=True))
    return end.reason


async def test_a_ticket_is_valid_for_its_own_offer_once(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        one, other = (
            source.agent.offer(name, [index], 16) for index, name in enumerate(("one", "other"))
        )
        forged = one.ticket[:-4] + ("AAAA" if one.ticket[-4:] != "AAAA" else "BBBB")
        assert await refused(source, sink, "one", forged) is EndReason.BAD_TICKET
        assert await refused(source, sink, "one", "no ticket at all") is EndReason.BAD_TICKET
        assert await refused(source, sink, "other", one.ticket) is EndReason.BAD_TICKET
        assert (
            await soon(
                sink.agent.fetch(
                    source.agent.address, "one", [5], 16, ticket=one.ticket
                ).wait_ended()
            )
        ).has_landed
        assert (await soon(one.wait_ended())).has_landed
        assert await refused(source, sink, "one", one.ticket) is EndReason.TICKET_SPENT
        again = source.agent.offer("one", [3], 16)
        assert await refused(source, sink, "one", one.ticket) is EndReason.TICKET_SPENT
        again.revoke()
        assert await refused(source, sink, "one", again.ticket) is EndReason.GONE
        other.revoke()


async def test_an_offer_is_claimed_once(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, ready_layers=0, public=True)
        first = sink.agent.fetch(source.agent.address, "r", [5], 16)
        await until(lambda: source.agent.stats()["leases"]["claimed"], "not claimed")
        assert await refused(source, sink, "r", None) is EndReason.NAME_TAKEN
        offer.mark_ready(4)
        assert (await soon(first.wait_ended())).has_landed
        assert source.agent.stats()["refused"] == {EndReason.NAME_TAKEN: 1}


async def test_only_one_invitation_may_wait_for_a_name(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        first = sink.agent.fetch(source.agent.address, "r", [5], 16)
        await until(lambda: source.agent.stats()["leases"]["waiting_invitations"], "not waiting")
        assert await refused(source, sink, "r", None) is EndReason.NAME_TAKEN
        source.agent.decline("r", "prefill failed")
        end = await soon(first.wait_ended())
        assert (end.reason, end.is_retriable, end.detail) == (
            EndReason.DECLINED,
            True,
            "prefill failed",
        )


async def test_waiting_invitations_are_limited(transport: str) -> None:
    strict = msgspec.structs.replace(PATIENT, max_waiting_invites=2)
    async with groups(transport, SMALL, SMALL, options=[strict]) as (source, sink):
        waiting = [
            sink.agent.fetch(source.agent.address, f"r{index}", [index], 16) for index in range(2)
        ]
        await until(
            lambda: source.agent.stats()["leases"]["waiting_invitations"] == 2, "not waiting"
        )
        assert await refused(source, sink, "one more", None) is EndReason.TOO_MANY_WAITING
        for transfer in waiting:
            transfer.cancel()


async def test_an_invitation_waits_for_a_limited_time(transport: str) -> None:
    """No step may happen before the time is over, however slow the machine is."""
    hasty = msgspec.structs.replace(PATIENT, invite_wait_s=0.1)
    async with groups(transport, SMALL, SMALL, options=[hasty]) as (source, sink):
        landing = sink.agent.fetch(source.agent.address, "r", [0], 16, timeout_s=10 * PATIENCE_S)
        assert (await soon(landing.wait_ended())).reason is EndReason.NEVER_OFFERED


async def test_an_offer_for_one_agent_is_refused_to_others(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, sink="somebody else")
        assert await refused(source, sink, "r", offer.ticket) is EndReason.BAD_TICKET
        assert await refused(source, sink, "r", None) is EndReason.BAD_TICKET
        mine = source.agent.offer("m", [1], 16, sink="p1")
        assert (
            await soon(
                sink.agent.fetch(
                    source.agent.address, "m", [4], 16, ticket=mine.ticket
                ).wait_ended()
            )
        ).has_landed
        offer.revoke()


async def test_more_tokens_than_are_on_offer_are_refused(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, public=True)
        assert await refused(source, sink, "r", None, tokens=17) is EndReason.TOKENS
        offer.revoke()


@pytest.mark.parametrize(
    ("change", "field"),
    [({"layers": 8}, "layers"), ({"head_dim": 32}, "head_dim"), ({"dtype": KvDtype.FP16}, "dtype")],
)
async def test_another_layout_is_refused_with_the_reason(
    transport: str, change: dict[str, object], field: str
) -> None:
    async with groups(transport, SMALL, shaped(**change)) as (source, sink):
        landing = sink.agent.fetch(source.agent.address, "r", [1], 16)
        end = await soon(landing.wait_ended())
        assert (end.reason, end.is_retriable) == (EndReason.LAYOUT, False)
        assert field in end.detail


async def test_another_family_is_refused(transport: str) -> None:
    families = [
        msgspec.structs.replace(PATIENT, family=family) for family in ("llama@1", "llama@2")
    ]
    async with groups(transport, SMALL, SMALL, options=families) as (source, sink):
        end = await soon(sink.agent.fetch(source.agent.address, "r", [1], 16).wait_ended())
        assert (end.reason, end.is_retriable) == (EndReason.LAYOUT, False)


async def test_without_the_fleets_key_nothing_is_answered(transport: str) -> None:
    async with groups(transport, SMALL, SMALL, keys=[b"k" * 32, b"q" * 32]) as (source, sink):
        offer = source.agent.offer("r", [0], 16)
        end = await soon(
            sink.agent.fetch(source.agent.address, "r", [1], 16, ticket=offer.ticket).wait_ended()
        )
        assert (end.reason, end.is_retriable) == (EndReason.WRONG_KEY, False)
        offer.revoke()


async def test_an_absent_peer_is_a_named_end(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        address = source.agent.address
        await source.agent.close()
        end = await soon(sink.agent.fetch(address, "r", [1], 16).wait_ended())
        assert end.reason in (EndReason.UNREACHABLE, EndReason.LINK_LOST)
        assert end.is_retriable

        # ---- given up by either side


async def test_the_sink_gives_up_at_any_time(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        before_link = sink.agent.fetch(source.agent.address, "never", [1], 16)
        before_link.cancel("client left")
        spans = [await seconds_to_cancel(source, sink, name) for name in ("r1", "r2", "r3")]
        assert min(spans) < 0.25 * PATIENCE_S / 20
        assert (await soon(before_link.wait_ended())).kind is OutcomeKind.CANCELLED


async def test_a_sink_that_gives_up_before_inviting_ends_the_offer(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        for name in ("no link yet", "memory may not be registered yet"):
            offer = source.agent.offer(name, [0], 16, ready_layers=0, ttl_s=10 * PATIENCE_S)
            landing = sink.agent.fetch(source.agent.address, name, [5], 16, ticket=offer.ticket)
            landing.cancel("client left")
            assert (await soon(landing.wait_ended())).kind is OutcomeKind.CANCELLED
            assert (await soon(offer.wait_ended())).kind is OutcomeKind.CANCELLED
            assert not source.agent.stats()["leases"]["offered"]


async def test_a_landing_repeated_before_there_is_a_link_is_served(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16)
        with sink.agent._lock:  # no link comes up meanwhile
            first = sink.agent.fetch(source.agent.address, "r", [5], 16, ticket=offer.ticket)
            first.cancel("client left")
            again = sink.agent.fetch(source.agent.address, "r", [6], 16, ticket=offer.ticket)
        assert (await soon(first.wait_ended())).kind is OutcomeKind.CANCELLED
        assert (await soon(again.wait_ended())).has_landed
        assert (await soon(offer.wait_ended())).has_landed


async def seconds_to_cancel(source: Group, sink: Group, name: str) -> float:
    """Cancel a transfer in progress; return the seconds until it has ended on both sides."""
    offer = source.agent.offer(name, [0], 16, ready_layers=0, public=True)
    landing = sink.agent.fetch(source.agent.address, name, [5], 16)
    await until(lambda: source.agent.stats()["leases"]["claimed"], "not claimed")
    began = time.monotonic()
    landing.cancel("client left")
    end = await soon(landing.wait_ended())
    assert (end.kind, end.reason, end.detail) == (
        OutcomeKind.CANCELLED,
        EndReason.CANCELLED,
        "client left",
    )
    assert (await soon(offer.wait_ended())).kind is OutcomeKind.CANCELLED
    span_s = time.monotonic() - began
    landing.cancel("again")
    assert landing.outcome is end
    return span_s


async def test_the_source_takes_back_what_is_claimed(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, ready_layers=0, public=True)
        before = [region.generations[0] for region in source.regions]
        landing = sink.agent.fetch(source.agent.address, "r", [5], 16)
        await until(lambda: source.agent.stats()["leases"]["claimed"], "not claimed")
        offer.revoke("preempted")
        assert (await soon(offer.wait_ended())).reason is EndReason.REVOKED
        end = await soon(landing.wait_ended())
        assert (end.kind, end.reason, end.is_retriable) == (
            OutcomeKind.CANCELLED,
            EndReason.REVOKED,
            True,
        )
        assert [region.generations[0] for region in source.regions] == [was + 1 for was in before]


async def test_a_lease_runs_out_unless_renewed(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        short = source.agent.offer("short", [0], 16, ttl_s=PATIENCE_S / 50)
        kept_offer = source.agent.offer("kept", [1], 16, ttl_s=PATIENCE_S / 4)
        assert kept_offer.renew(10 * PATIENCE_S)
        end = await soon(short.wait_ended())
        assert (end.kind, end.reason) == (OutcomeKind.EXPIRED, EndReason.LEASE_EXPIRED)
        assert await refused(source, sink, "short", short.ticket) is EndReason.TICKET_EXPIRED
        assert not short.renew(1)
        landing = sink.agent.fetch(source.agent.address, "kept", [4], 16, ticket=kept_offer.ticket)
        assert (await soon(landing.wait_ended())).has_landed


async def test_a_landing_has_a_deadline(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        source.agent.offer("opens the link", [1], 16, public=True)
        assert (
            await soon(
                sink.agent.fetch(source.agent.address, "opens the link", [6], 16).wait_ended()
            )
        ).has_landed
        offer = source.agent.offer("r", [0], 16, ready_layers=0, public=True)
        landing = sink.agent.fetch(source.agent.address, "r", [5], 16, timeout_s=PATIENCE_S / 100)
        end = await soon(landing.wait_ended())
        assert (end.kind, end.reason) == (OutcomeKind.EXPIRED, EndReason.TIMEOUT)
        assert (await soon(offer.wait_ended())).reason is EndReason.TIMEOUT


async def test_closing_ends_everything_on_both_sides(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offers = [
            source.agent.offer(f"r{index}", [index], 16, ready_layers=0, public=True)
            for index in range(3)
        ]
        landings = [
            sink.agent.fetch(source.agent.address, f"r{index}", [index], 16) for index in range(4)
        ]
        await until(lambda: source.agent.stats()["leases"]["claimed"] == 3, "not claimed")
        await soon(source.agent.close())
        assert {transfer.outcome.reason for transfer in offers if transfer.outcome} == {
            EndReason.CLOSED
        }
        ends = [await soon(transfer.wait_ended()) for transfer in landings]
        assert {end.reason for end in ends} <= {EndReason.CLOSED, EndReason.LINK_LOST}
        with pytest.raises(RuntimeError):
            source.agent.offer("more", [0], 16, public=True)


async def test_blocks_that_changed_owner_despite_a_lease_never_land(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0, 1], 32, ready_layers=0, public=True)
        landing = sink.agent.fetch(source.agent.address, "r", [5, 6], 32)
        await until(lambda: source.agent.stats()["leases"]["claimed"], "not claimed")
        source.regions[1].bump([1])
        offer.mark_ready(4)
        end = await soon(landing.wait_ended())
        assert (end.kind, end.reason, end.is_retriable) == (
            OutcomeKind.FAILED,
            EndReason.STALE,
            True,
        )
        assert (await soon(offer.wait_ended())).reason is EndReason.STALE


async def test_nothing_writes_the_sinks_blocks_after_an_end(transport: str) -> None:
    layout = shaped(head_dim=64, block_tokens=64)
    async with groups(transport, layout, layout) as (source, sink):
        for region in source.regions:
            region.bytes[:] = 0x55
        for index in range(12):
            offer = source.agent.offer(f"r{index}", range(16), 16 * 64)
            landing = sink.agent.fetch(
                source.agent.address, f"r{index}", range(16, 32), 16 * 64, ticket=offer.ticket
            )
            if index % 3:
                await until(lambda: source.agent.stats()["leases"]["offered"] == 0, "not claimed")
            (landing.cancel if index % 2 else offer.revoke)()
            await soon(landing.wait_ended())
            for region in sink.regions:
                region.bytes[:] = 0xAA
            await soon(offer.wait_ended())
            for region in source.regions:
                region.bytes[:] = 0x55
            await asyncio.sleep(0.02)
            assert all((region.bytes == 0xAA).all() for region in sink.regions)


async def test_a_dead_link_is_replaced(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        for name in ("one", "two"):
            offer = source.agent.offer(name, [0], 16)
            landing = sink.agent.fetch(source.agent.address, name, [5], 16, ticket=offer.ticket)
            assert (await soon(landing.wait_ended())).has_landed
            await soon(offer.wait_ended())
            for link in list(source.agent._board._peer_links):
                link.close()
            await until(lambda: not len(sink.agent._board), "the sink did not notice")


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
            with pytest.raises(ValueError, match="an offer needs a finite time"):
                source.agent.offer("r", [0], 16, ttl_s=seconds)
            with pytest.raises(ValueError, match="a landing needs a finite time"):
                sink.agent.fetch(source.agent.address, "r", [1], 16, timeout_s=seconds)
        with pytest.raises(
            ValueError, match="priority must be one of interactive, bulk, migration, not 'urgent'"
        ):
            sink.agent.fetch(source.agent.address, "r", [1], 16, priority="urgent")
        offer = source.agent.offer("r", [0], 16)
        with pytest.raises(ValueError, match="an offer needs a finite time"):
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
