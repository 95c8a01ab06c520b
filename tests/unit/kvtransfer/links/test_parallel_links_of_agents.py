"""Tests of when two KV agents open, keep and lose parallel connections (lanes).

Each transfer ends once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvtransfer.links import link_manager
from kvtransfer.links.link_manager import LinkManager
from kvtransfer.links.peer_link import DialRequest, PeerLink
from kvtransfer.protocol.agent_messages import StopTransfer
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.protocol.session_authentication import LinkSession
from kvtransfer.transport_interface import Link
from kvtransfer.transports.tcp import Tcp
from kvtransfer.util.agent_options import AgentOptions
from tests.contract.kvtransfer.groups import PATIENT, SMALL, Cache, Group, groups, until
from tests.contract.kvtransfer.links import LANES, PATIENCE_S
from tests.unit.kvtransfer.transports.stream.lane_access import laned, lanes_of, standing


@pytest.fixture
def shorten_retry_times(monkeypatch: pytest.MonkeyPatch) -> None:
    later = LinkManager._call_later
    monkeypatch.setattr(LinkManager, "_call_later", lambda self, _, call: later(self, 0.05, call))


async def transfer_one(source: Group, sink: Group, name: str) -> None:
    cache = Cache(SMALL, 64, seed=4)
    cache.write(SMALL, source.regions, [1, 2, 3, 4])
    offer = source.agent.offer(name, [1, 2, 3, 4], 64)
    landing = sink.agent.fetch(source.agent.address, name, [7, 9, 11, 2], 64, ticket=offer.ticket)
    end = await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)
    assert end.has_landed, end
    assert not cache.differs(SMALL, sink.regions, [7, 9, 11, 2])
    assert (await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)).has_landed


def lines(group: Group) -> list[PeerLink]:
    return list(group.agent._link_manager._peer_links.values())


def first_of(group: Group) -> PeerLink:
    (open_lines,) = (line for line in lines(group) if line.lane_owner is None)
    return open_lines


async def until_lanes(group: Group, count: int) -> None:
    board = group.agent._link_manager

    def there() -> bool:
        with board._lock:
            open_lines = lines(group)
            links = [line for line in open_lines if line.lane_owner is None]
            if len(links) != 1 or len(open_lines) != 1 + count or board._dials:
                return False
            (link,), lanes = links, {line for line in open_lines if line.lane_owner is not None}
            return lanes == set(link.lanes) and {line.link for line in lanes} == set(
                lanes_of(link.link)
            )

    await until(there)
    assert len(board) == group.agent.stats()["links"] == 1


@asynccontextmanager
async def with_lanes(options: AgentOptions = PATIENT) -> AsyncIterator[list[Group]]:
    async with groups("lanes", SMALL, SMALL, options=(options, options)) as (source, sink):
        await transfer_one(source, sink, "a")
        for side in (source, sink):
            await until_lanes(side, LANES - 1)
        yield [source, sink]

        # ---- opened


async def test_agents_open_as_many_as_the_sink_wants_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seek, under_way = LinkManager._start_dial, []

    def counted(self: LinkManager, dialling: DialRequest) -> None:
        seek(self, dialling)
        under_way.append(self._dials)

    monkeypatch.setattr(LinkManager, "_start_dial", counted)
    async with with_lanes() as (source, sink):
        assert under_way == [1] * LANES
        assert first_of(source).session.budget_bytes == LANES * sink.agent.options.budget_bytes
        await transfer_one(source, sink, "b")


async def test_no_lane_is_dialled_before_the_source_has_sent_a_message() -> None:
    # A lane could otherwise arrive before the proof on the first link, for an unknown link.
    silent = msgspec.structs.replace(PATIENT, beat_s=60.0)
    async with groups("lanes", SMALL, SMALL, options=(silent, silent)) as (source, sink):
        landing = sink.agent.fetch(source.agent.address, "a", [7], 16)  # not offered yet
        board = sink.agent._link_manager
        await until(lambda: any(line.is_in_use for line in board._peer_links.values()))
        await asyncio.sleep(0.1)
        assert (len(board), board._dials) == (1, 0)
        await until_lanes(sink, 0)
        source.agent.offer("a", [1], 16, public=True)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed
        for side in (source, sink):
            await until_lanes(side, LANES - 1)
        assert source.agent.stats()["refused"] == {}


def set_lane_owner(
    monkeypatch: pytest.MonkeyPatch, lane_of: Callable[[LinkSession], bytes]
) -> None:
    greeting = LinkManager._dialler_session

    def wrong(self: LinkManager, link: Link, dialling: DialRequest) -> LinkSession:
        session = greeting(self, link, dialling)
        if session.lane_of:
            session.lane_of = lane_of(session)
        return session

    monkeypatch.setattr(LinkManager, "_dialler_session", wrong)


@pytest.mark.usefixtures("shorten_retry_times")
@pytest.mark.parametrize("itself", [True, False])
async def test_a_lane_of_an_unknown_link_is_refused_and_the_link_survives(
    itself: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_lane_owner(monkeypatch, lambda session: session.greeting if itself else b"x" * 16)
    async with groups("lanes", SMALL, SMALL) as (source, sink):
        await transfer_one(source, sink, "a")
        await until(lambda: caplog.text.count("a lane (parallel link) to") == 3)
        await asyncio.sleep(0.2)
        assert source.agent.stats()["refused"] == {EndReason.LINK_LOST: 3}
        for side in (source, sink):
            await until_lanes(side, 0)
        await transfer_one(source, sink, "b")


async def test_a_lane_of_another_members_link_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with groups("lanes", SMALL, SMALL, SMALL) as (source, sink, thief):
        await transfer_one(source, sink, "a")
        for side in (source, sink):
            await until_lanes(side, LANES - 1)
        theirs = first_of(sink).session.greeting
        set_lane_owner(monkeypatch, lambda session: theirs)
        offer = source.agent.offer("b", [1], 16)
        landing = thief.agent.fetch(source.agent.address, "b", [1], 16, ticket=offer.ticket)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed
        await until(lambda: bool(source.agent.stats()["refused"].get(EndReason.LINK_LOST)))
        assert {
            line.peer: len(line.lanes)
            for line in lines(source)
            if line.is_proven and line.lane_owner is None
        } == {"p1": LANES - 1, "p2": 0}


async def test_a_lane_of_a_lane_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[LinkSession] = []

    def of_the_one_before(session: LinkSession) -> bytes:
        sessions.append(session)
        return sessions[-2].greeting if len(sessions) > 1 else session.lane_of

    set_lane_owner(monkeypatch, of_the_one_before)
    async with groups("lanes", SMALL, SMALL) as (source, sink):
        await transfer_one(source, sink, "a")
        await until(lambda: bool(source.agent.stats()["refused"].get(EndReason.LINK_LOST)))
        assert len(first_of(source).lanes) == 1


async def test_a_source_refuses_lanes_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_manager, "MAX_LANES", LANES - 1)
    async with groups("lanes", SMALL, SMALL) as (source, sink):
        await transfer_one(source, sink, "a")
        await until(lambda: source.agent.stats()["refused"] == {EndReason.PROTOCOL: 1})
        for side in (source, sink):
            await until_lanes(side, LANES - 2)
        await transfer_one(source, sink, "b")


@pytest.mark.usefixtures("shorten_retry_times")
async def test_a_lane_that_cannot_be_dialled_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dial, dialled = Tcp.dial, []

    def fails_once(self: Tcp, address: str) -> Link:
        dialled.append(address)
        if len(dialled) == 2:
            raise link_manager.TransportError("the test lets the second connection fail: no route")
        return dial(self, address)

    monkeypatch.setattr(Tcp, "dial", fails_once)
    async with with_lanes():
        assert len(dialled) == LANES + 1
        assert "failed: the test lets the second connection fail: no route" in caplog.text

        # ---- alive


async def test_beats_go_by_lanes_as_by_links() -> None:
    often = msgspec.structs.replace(PATIENT, beat_s=0.02, max_missed_beats=1000)
    async with with_lanes(often) as (source, sink):
        for side in (source, sink):
            before = [line.link.received_bytes for line in lines(side)]
            await until(
                lambda side=side, before=before: all(
                    line.link.received_bytes > heard + 100
                    for line, heard in zip(lines(side), before, strict=True)
                )
            )


@pytest.mark.usefixtures("shorten_retry_times")
async def test_any_other_message_on_a_lane_closes_it(caplog: pytest.LogCaptureFixture) -> None:
    async with with_lanes() as (source, sink):
        first_of(source).lanes[0].send(StopTransfer(1, EndReason.CANCELLED))
        await until(lambda: sink.agent.stats()["faults"] == {"protocol": 1})
        await until(lambda: "failed: a StopTransfer message arrived on a lane" in caplog.text)
        await until_lanes(sink, LANES - 1)
        await transfer_one(source, sink, "b")

        # ---- lost


@pytest.mark.usefixtures("shorten_retry_times")
async def test_an_unused_lane_that_is_lost_is_redialled_and_the_link_survives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with with_lanes() as (source, sink):
        assert not any(line.link.has_carried_windows for line in first_of(source).lanes)  # type: ignore[attr-defined]
        offer = source.agent.offer("b", [1], 16, ready_layers=0)
        landing = sink.agent.fetch(source.agent.address, "b", [1], 16, ticket=offer.ticket)
        gone = lanes_of(first_of(source).link)[0]
        gone._sock.shutdown(socket.SHUT_RDWR)
        for side in (source, sink):
            await until(lambda side=side: gone not in lanes_of(first_of(side).link))
            await until_lanes(side, LANES - 1)
        await until(lambda: caplog.text.count("a lane (parallel link) to") == 2)  # at both ends
        offer.mark_ready(SMALL.layers)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed


@pytest.mark.usefixtures("shorten_retry_times")
@pytest.mark.parametrize("at_source", [True, False])
async def test_with_a_lane_that_was_used_the_link_is_lost(at_source: bool) -> None:
    async with with_lanes() as (source, sink):
        offer = source.agent.offer("b", [1], 16, ready_layers=0)
        landing = sink.agent.fetch(source.agent.address, "b", [1], 16, ticket=offer.ticket)
        await until(lambda: bool(source.agent.stats()["leases"]["claimed"]))
        lane = lanes_of(first_of(source if at_source else sink).link)[0]
        lane.has_carried_windows = True
        lane._sock.shutdown(socket.SHUT_RDWR)
        ends = [await asyncio.wait_for(side.wait_ended(), PATIENCE_S) for side in (offer, landing)]
        assert [end.reason for end in ends] == [EndReason.LINK_LOST, EndReason.LINK_LOST]
        assert "a lane is lost" in ends[0 if at_source else 1].detail
        for side in (source, sink):
            await until(lambda side=side: not lines(side))
        await transfer_one(source, sink, "c")


async def test_transfers_started_after_a_used_lane_is_lost_use_a_new_link() -> None:
    # The old link ends later, with its transfers, so that its last messages arrive.
    async with with_lanes() as (source, sink):
        old = first_of(sink)
        offer = source.agent.offer("b", [1], 16, ready_layers=0)
        landing = sink.agent.fetch(source.agent.address, "b", [1], 16, ticket=offer.ticket)
        await until(lambda: bool(source.agent.stats()["leases"]["claimed"]))
        for lane in lanes_of(old.link):
            lane.has_carried_windows = True
        lanes_of(old.link)[0]._sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: len(old.lanes) < LANES - 1)
        await transfer_one(source, sink, "c")
        assert len([line for line in lines(sink) if line.is_in_use]) == 2
        offer.mark_ready(SMALL.layers)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed


@pytest.mark.usefixtures("shorten_retry_times")
async def test_a_lane_that_takes_its_first_window_while_closing_counts_as_used() -> None:
    async with with_lanes() as (source, sink):
        (line, *_), board = first_of(source).lanes, source.agent._link_manager
        with board._lock:
            source.agent.on_lost(line.link, "silent")
            laned(line.link).has_carried_windows = True
        await until(lambda: not lines(source) and not lines(sink))


async def test_the_links_last_messages_count_after_its_lanes_have_ended() -> None:
    async with with_lanes() as (source, sink):
        offer = source.agent.offer("b", [1], 16, ready_layers=0)
        landing = sink.agent.fetch(source.agent.address, "b", [1], 16, ticket=offer.ticket)
        await until(lambda: bool(source.agent.stats()["leases"]["claimed"]))
        link = first_of(sink).link
        lanes = lanes_of(link)
        for lane in lanes:
            lane.has_carried_windows = True
        with standing(link):
            await source.agent.close()
            await until(lambda: not first_of(sink).lanes)
        end = await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)
        assert (end.reason, end.detail) == (EndReason.CLOSED, "")


@pytest.mark.parametrize("at_source", [True, False])
async def test_with_the_link_its_lanes_end(at_source: bool) -> None:
    async with with_lanes() as (source, sink):
        lanes = [lane for side in (source, sink) for lane in lanes_of(first_of(side).link)]
        laned(first_of(source if at_source else sink).link)._sock.shutdown(socket.SHUT_RDWR)
        for side in (source, sink):
            await until(lambda side=side: not lines(side))
        await until(lambda: not any(lane._thread.is_alive() for lane in lanes))
        await transfer_one(source, sink, "b")


async def test_with_an_agent_its_lanes_end() -> None:
    async with with_lanes() as (source, sink):
        lanes = lanes_of(first_of(source).link)
        await sink.agent.close()
        await until(lambda: not any(lane._thread.is_alive() for lane in lanes))
