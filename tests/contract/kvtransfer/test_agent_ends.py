"""Tests of KV transfers that do not complete: they are cancelled, revoked, expire or lose the link.

Each test runs over every transport.
"""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.protocol.outcomes import EndReason, OutcomeKind
from tests.contract.kvtransfer.agent_pairs import refused, shaped, soon
from tests.contract.kvtransfer.groups import SMALL, Group, groups, until
from tests.contract.kvtransfer.links import PATIENCE_S, TRANSPORTS
from tests.duration_limits import Stopwatch

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


async def test_an_absent_peer_is_a_named_end(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        address = source.agent.address
        await source.agent.close()
        end = await soon(sink.agent.fetch(address, "r", [1], 16).wait_ended())
        assert end.reason in (EndReason.UNREACHABLE, EndReason.LINK_LOST)
        assert end.is_retriable


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
        with sink.agent._lock:  # while the lock is held, no link can be opened
            first = sink.agent.fetch(source.agent.address, "r", [5], 16, ticket=offer.ticket)
            first.cancel("client left")
            again = sink.agent.fetch(source.agent.address, "r", [6], 16, ticket=offer.ticket)
        assert (await soon(first.wait_ended())).kind is OutcomeKind.CANCELLED
        assert (await soon(again.wait_ended())).has_landed
        assert (await soon(offer.wait_ended())).has_landed


async def seconds_to_cancel(source: Group, sink: Group, name: str) -> float:
    # Cancel a transfer in progress; return the seconds until it has ended on both sides, without
    # time in which this process had no CPU.
    offer = source.agent.offer(name, [0], 16, ready_layers=0, public=True)
    landing = sink.agent.fetch(source.agent.address, name, [5], 16)
    await until(lambda: source.agent.stats()["leases"]["claimed"], "not claimed")
    took = Stopwatch()
    landing.cancel("client left")
    end = await soon(landing.wait_ended())
    assert (end.kind, end.reason, end.detail) == (
        OutcomeKind.CANCELLED,
        EndReason.CANCELLED,
        "client left",
    )
    assert (await soon(offer.wait_ended())).kind is OutcomeKind.CANCELLED
    span_s = took.fair_s
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
            for link in list(source.agent._link_manager._peer_links):
                link.close()
            await until(lambda: not len(sink.agent._link_manager), "the sink did not notice")
