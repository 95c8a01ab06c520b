"""Tests that two KV agents use the best transport that both have, or another one if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.transport_interface import Link, LinkOwner, Transport, TransportError
from kvtransfer.transports.shm import Shm
from kvtransfer.transports.tcp import Tcp
from tests.contract.kvtransfer.groups import PATIENT, SMALL, Cache, Group, group
from tests.contract.kvtransfer.links import PATIENCE_S
from tests.duration_limits import within


class RefusingShm(Shm):
    def dial(self, address: str) -> Link:
        raise TransportError("the test refuses to listen, as without permission")


class SilentShm(Shm):
    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        class IgnoringOwner:
            def __getattr__(self, name: str) -> object:
                return lambda *_: None

        return super().start(IgnoringOwner(), regions)  # type: ignore[arg-type]


@asynccontextmanager
async def two(
    ours: list[Transport], theirs: list[Transport], **changes: object
) -> AsyncIterator[tuple[Group, Group]]:
    async with AsyncExitStack() as stack:
        options = msgspec.structs.replace(PATIENT, **changes)
        members = [
            group(name, SMALL, ways, options=options) for name, ways in (("p", theirs), ("d", ours))
        ]
        for member in members:
            stack.callback(member.forget)
            await member.agent.start()
            stack.push_async_callback(member.agent.close)
        yield members[0], members[1]
        assert [member.held for member in members] == [0, 0]


async def way(source: Group, sink: Group, name: str = "r") -> str:
    cache = Cache(SMALL, 32, seed=4)
    cache.write(SMALL, source.regions, [1, 2])
    offer = source.agent.offer(name, [1, 2], 32)
    landing = sink.agent.fetch(source.agent.address, name, [7, 9], 32, ticket=offer.ticket)
    end = await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)
    assert end.has_landed, end
    await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)
    assert cache.differs(SMALL, sink.regions, [7, 9]) == 0
    return end.transport


async def test_agents_that_meet_by_tcp_on_one_host_switch_to_shared_memory() -> None:
    async with two([Tcp(), Shm()], [Tcp(), Shm()]) as (source, sink):
        assert await way(source, sink) == "shm"
        assert await way(source, sink, "next") == "shm"
        assert sink.agent.stats()["links"] == 1


@pytest.mark.parametrize(
    "theirs", [[Tcp()], [Tcp(), Shm()]], ids=["they have no shm", "another host"]
)
async def test_tcp_stays_if_only_one_end_has_the_better_transport(theirs: list[Transport]) -> None:
    host = {} if len(theirs) == 1 else {"host": ""}
    async with two([Tcp(), Shm()], theirs, **host) as (source, sink):
        assert await way(source, sink) == "tcp"
        assert sink.agent.stats()["faults"] == {}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(RefusingShm, Shm), (Shm, SilentShm)],
    ids=["cannot be dialled", "does not answer"],
)
async def test_a_better_transport_that_does_not_open_does_not_end_the_transfer(
    ours: type[Shm], theirs: type[Shm]
) -> None:
    async with two([Tcp(), ours()], [Tcp(), theirs()], handshake_s=PATIENCE_S / 10) as (
        source,
        sink,
    ):
        assert await way(source, sink) == "tcp"
        assert await way(source, sink, "next") == "tcp"
        assert sink.agent.stats()["faults"] == {"fallback": 1}
        assert sink.agent.stats()["links"] == 1


async def test_a_landing_cancelled_while_dialling_ends_at_once() -> None:
    async with two([Tcp(), Shm()], [Tcp(), SilentShm()], handshake_s=PATIENCE_S / 4) as (
        source,
        sink,
    ):
        landing = sink.agent.fetch(source.agent.address, "r", [1], 16)
        await asyncio.sleep(0.05)
        landing.cancel()
        assert (await within(PATIENCE_S / 8, landing.wait_ended())).reason is EndReason.CANCELLED
