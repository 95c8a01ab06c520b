"""Lanes: windows that go by several connections at once, and nothing that this could bring into disorder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import pytest

from kvtransfer import switchboard
from kvtransfer.ends import Reason
from kvtransfer.frame import Kind, frame
from kvtransfer.lattice import Runs
from kvtransfer.session import Session
from kvtransfer.switchboard import Switchboard
from kvtransfer.transports import lanes
from kvtransfer.transports.base import Link, Verdict, WindowHead
from kvtransfer.transports.lanes import LanedLink
from tests.contract.kvtransfer.groups import PATIENT, SMALL, Cache, Group, groups
from tests.contract.kvtransfer.links import BLOCK_BYTES, LANES, PATIENCE_S, Pair, expected, linked_pair, until, window


@pytest.fixture
def pair() -> Iterator[Pair]:
    with linked_pair("lanes") as made:
        yield made


def laned(link: Link) -> LanedLink:
    assert isinstance(link, LanedLink)
    return link


def lanes_of(link: Link) -> tuple[LanedLink, ...]:
    return laned(link)._wide.all


@contextmanager
def standing(link: Link) -> Iterator[None]:
    """Its thread stands still meanwhile, as in a copy that takes long."""
    each = laned(link)
    each._count_drivers(1)
    try:
        each._wake()
        with each._lead:
            yield
    finally:
        each._count_drivers(-1)


def blocks(count: int, first: int = 0) -> dict[WindowHead, Runs]:
    """So many windows of a block each, of transfer 1."""
    at = np.arange(first, first + count) * BLOCK_BYTES
    runs = [Runs(at[i : i + 1], at[i : i + 1], np.array([BLOCK_BYTES])) for i in range(count)]
    return {window(1, each, first=first + i): each for i, each in enumerate(runs)}


def begun(pair: Pair, more: int) -> dict[WindowHead, Runs]:
    """A transfer of which the sink has taken one window in, and said so, with so many more to come."""
    windows = blocks(more + 1)
    pair.expect(windows)
    pair.admit(1)
    first, *rest = windows.items()
    pair.put(*first)
    pair.hears.wait("landed")
    pair.sink.send(b"spread before this")
    pair.gives.wait("message")
    return dict(rest)


def test_windows_go_by_the_lanes_while_the_first_link_is_busy(pair: Pair) -> None:
    rest = begun(pair, 9)
    with standing(pair.source):
        for each in rest.items():
            pair.put(*each)
        pair.hears.wait("landed", 9)  # all but the one that is next in its own line
    heard = pair.hears.wait("landed", 10)
    assert {verdict for _, verdict in heard} == {Verdict.OK}  # type: ignore[misc]
    assert {each.link for each in pair.hears.heard if each.kind in ("landed", "incoming")} == {pair.sink}
    pair.gives.wait("sent", 10)
    assert {each.link for each in pair.gives.heard if each.kind == "sent"} == {pair.source}
    assert np.array_equal(pair.into.bytes, expected(pair, *blocks(10).values()))
    assert sum(lane.received_bytes > BLOCK_BYTES for lane in lanes_of(pair.sink)) >= 1


def test_no_window_overtakes_what_was_said_before_it(pair: Pair) -> None:
    windows = blocks(10)
    pair.expect(windows)
    pair.admit(1)
    with standing(pair.source):
        pair.source.send(b"the announcement")
        for each in windows.items():
            pair.put(*each)
        assert not laned(pair.source).crowded  # no lane finds one
    pair.hears.wait("landed", 10)
    order = [each.kind for each in pair.hears.heard if each.kind in ("message", "incoming")]
    assert order[0] == "message"


def test_of_a_dropped_transfer_no_lane_takes_a_window(pair: Pair) -> None:
    rest = begun(pair, 5)
    source = laned(pair.source)
    with ExitStack() as still:
        for each in (source, *lanes_of(source)):
            still.enter_context(standing(each))
        for head, runs in rest.items():
            pair.put(head, runs)
        assert source.crowded
        pair.source.drop(1)
        assert not source.crowded
        assert source.spare() is None


def test_the_fence_is_told_when_no_lane_writes_any_more(pair: Pair) -> None:
    last = lanes_of(pair.sink)[-1]
    with standing(last):
        pair.sink.fence(1)
        pair.source.send(b"the first link goes on")
        pair.hears.wait("message")
        assert pair.hears.all("fenced") == []
    assert pair.hears.wait("fenced") == [1]


def test_a_link_that_is_lost_has_its_fence_when_no_lane_writes_any_more(pair: Pair) -> None:
    last = lanes_of(pair.sink)[-1]
    with standing(last):
        laned(pair.source)._sock.shutdown(socket.SHUT_RDWR)
        pair.hears.wait("lost")
        pair.sink.fence(1)
        assert pair.hears.all("fenced") == []
    assert pair.hears.wait("fenced") == [1]


@pytest.mark.parametrize("which", [0, -1])
def test_with_a_lane_the_link_is_lost_and_told_of_once(pair: Pair, which: int) -> None:
    lane = lanes_of(pair.source)[which]
    lane.used = True
    lane._sock.shutdown(socket.SHUT_RDWR)
    assert "lane" in str(pair.gives.wait("lost")[0])
    pair.hears.wait("lost")
    for link in (pair.sink, pair.source):
        for each in (laned(link), *lanes_of(link)):
            each.join()
    assert [len(owner.all("lost")) for owner in (pair.hears, pair.gives)] == [1, 1]


def test_with_the_link_its_lanes_are_closed(pair: Pair) -> None:
    pair.sink.close()
    for link in (pair.sink, pair.source):
        for each in (laned(link), *lanes_of(link)):
            each.join()
    assert pair.hears.all("lost") == []
    assert len(pair.gives.all("lost")) == 1


def test_a_lane_that_comes_when_its_link_has_ended_is_closed(pair: Pair) -> None:
    laned(pair.sink).close()
    laned(pair.sink).join()
    with linked_pair("tcp") as other:
        laned(pair.sink).widen(other.sink)
        laned(other.sink).join()
        assert other.hears.all("lost") == []


def test_who_speaks_on_a_lane_ends_the_link(pair: Pair) -> None:
    lanes_of(pair.source)[0].send(b"a word")
    assert "windows alone" in str(pair.hears.wait("lost")[0])


@pytest.mark.parametrize("header", [bytes(8), bytes(7), b""])
def test_only_a_sink_says_that_windows_may_spread_and_says_it_well(pair: Pair, header: bytes) -> None:
    laned(pair.source)._out.queue(frame(Kind.SPREAD, header))
    laned(pair.source)._wake(always=True)
    assert "for the sink to say" in str(pair.hears.wait("lost")[0])


def test_a_source_remembers_the_newest_transfers_that_may_spread() -> None:
    with linked_pair("lanes") as pair:
        out = laned(pair.source)._out
        for transfer in range(1000):
            out.share(transfer)
        assert len(out._shared) == 256
        assert 999 in out._shared


# ---- as agents open them


async def moved(source: Group, sink: Group, name: str) -> None:
    """One request's KV, checked byte by byte."""
    cache = Cache(SMALL, 64, seed=4)
    cache.write(SMALL, source.regions, [1, 2, 3, 4])
    offer = source.agent.offer(name, [1, 2, 3, 4], 64)
    landing = sink.agent.fetch(source.agent.address, name, [7, 9, 11, 2], 64, ticket=offer.ticket)
    end = await asyncio.wait_for(landing.ended(), PATIENCE_S)
    assert end.landed, end
    assert not cache.differs(SMALL, sink.regions, [7, 9, 11, 2])
    assert (await asyncio.wait_for(offer.ended(), PATIENCE_S)).landed


async def until_lanes(group: Group, count: int) -> None:
    """Its one link has so many lanes besides itself."""
    for _ in range(4000):
        links = list(group.agent._board._lines)
        if len(links) == 1 and len(lanes_of(links[0])) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{len(links)} links, lanes of each: {[len(lanes_of(link)) for link in links]}")


async def test_agents_open_as_many_as_the_sink_wants() -> None:
    async with groups("lanes", SMALL, SMALL) as (source, sink):
        await moved(source, sink, "a")
        for each in (source, sink):
            await until_lanes(each, LANES - 1)
            assert each.agent.figures()["links"] == 1
        await moved(source, sink, "b")


async def test_no_lane_is_dialled_before_the_source_has_said_something() -> None:
    """It might overtake the proof on the first link, and be of no link that the source knows."""
    silent = msgspec.structs.replace(PATIENT, beat_s=60.0)
    async with groups("lanes", SMALL, SMALL, options=(silent, silent)) as (source, sink):
        landing = sink.agent.fetch(source.agent.address, "a", [7], 16)  # which nobody offers yet
        board = sink.agent._board
        for _ in range(4000):
            if any(line.linked for line in board._lines.values()):
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert (len(board), board._dials) == (1, 0)
        await until_lanes(sink, 0)
        source.agent.offer("a", [1], 16, public=True)
        assert (await asyncio.wait_for(landing.ended(), PATIENCE_S)).landed
        for each in (source, sink):
            await until_lanes(each, LANES - 1)
        assert source.agent.figures()["refused"] == {}


def test_a_lane_that_was_not_used_yet_is_missed_by_nobody(pair: Pair) -> None:
    lane = lanes_of(pair.source)[0]
    lane._sock.shutdown(socket.SHUT_RDWR)
    lane.join()
    rest = begun(pair, 9)
    for each in rest.items():
        pair.put(*each)
    pair.hears.wait("landed", 10)
    pair.sink.fence(1)
    assert pair.hears.wait("fenced") == [1]
    assert pair.hears.all("lost") == pair.gives.all("lost") == []


def test_a_lane_whose_peer_takes_nothing_any_more_is_lost_and_its_link_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_LOST_MS", 300)
    with linked_pair("lanes") as pair:
        rest = begun(pair, 9)
        for link in (pair.source, pair.sink):
            for lane in lanes_of(link):
                for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # so little that no window fits
                    lane._sock.setsockopt(socket.SOL_SOCKET, buffer, 4096)
        with ExitStack() as still:
            for lane in lanes_of(pair.sink):
                still.enter_context(standing(lane))
            with standing(pair.source):
                for each in rest.items():
                    pair.put(*each)
                until(lambda: any(lane.used for lane in lanes_of(pair.source)))
            assert pair.gives.wait("lost") == ["a lane is lost: Connection timed out"]


@pytest.mark.parametrize("itself", [True, False])
async def test_a_lane_of_no_other_link_that_is_there_is_refused_and_missed_by_nobody(
    itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeting = Switchboard._greeting

    def wrong(self: Switchboard, link: Link, dialling: switchboard.Dialling) -> Session:
        session = greeting(self, link, dialling)
        if session.lane_of:
            session.lane_of = session.greeting if itself else b"x" * 16
        return session

    monkeypatch.setattr(Switchboard, "_greeting", wrong)
    async with groups("lanes", SMALL, SMALL) as (source, sink):
        await moved(source, sink, "a")
        for _ in range(4000):
            if source.agent.figures()["refused"].get(Reason.LINK_LOST) == LANES - 1:
                break
            await asyncio.sleep(0.005)
        assert source.agent.figures()["refused"] == {Reason.LINK_LOST: LANES - 1}
        await until_lanes(source, 0)
        await moved(source, sink, "b")


async def test_a_source_takes_no_more_lanes_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard, "MOST_LANES", LANES - 1)
    async with groups("lanes", SMALL, SMALL) as (source, sink):
        await moved(source, sink, "a")
        await until_lanes(source, LANES - 2)
        await moved(source, sink, "b")
