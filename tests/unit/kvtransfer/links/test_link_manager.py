"""Tests of connections between KV agents: which are accepted, and when one is replaced."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import NoReturn
from unittest.mock import Mock

import msgspec
import pytest

from kvtransfer.layout.memory_regions import Region
from kvtransfer.links.link_manager import LinkManager
from kvtransfer.links.peer_link import DialRequest, PeerLink
from kvtransfer.protocol.agent_messages import AgentCard, Beat, Message
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.protocol.session_authentication import LinkSession
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.transport_interface import Link, LinkOwner, TransportError
from kvtransfer.transports.shm import Shm
from kvtransfer.transports.tcp import Tcp
from kvtransfer.util.agent_lock import AgentLock
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import ThreadClock
from tests.contract.kvtransfer.groups import KEY, PATIENT, SMALL, Group, group, groups, until
from tests.contract.kvtransfer.links import PATIENCE_S


class FakeLink:
    transport, peer, received_bytes, window_bytes, is_one_sided = "fake", "x", 0, 1 << 20, False


def test_occasional_bytes_do_not_extend_the_time_for_the_proof() -> None:
    link, options = FakeLink(), AgentOptions(handshake_s=2.0)
    line = PeerLink(
        link,
        LinkSession(KEY, bytes(16), AgentCard("p", bytes(16), SMALL), is_dialler=False),
        None,
        10.0,
    )  # type: ignore[arg-type]
    for index in range(1, 19):
        link.received_bytes = index
        assert not line.is_silent(10.0 + index / 10, 0.0, options)
    assert line.is_silent(12.0, 0.0, options)
    line.is_proven = True
    assert not line.is_silent(12.0, 0.0, options)


def switchboard(transport: object) -> tuple[LinkManager, list[tuple[str, EndReason, str]]]:
    heard: list[tuple[str, EndReason, str]] = []
    book = Mock()
    book.on_link_failed = lambda address, reason, detail, now: (
        heard.append((address, reason, detail)) or []
    )
    clock = Mock(now=lambda: 0.0, run_in_thread=lambda work: work())
    board = LinkManager(
        KEY,
        {"tcp": transport},
        clock,
        AgentOptions(),
        (book, Mock(), AgentStats()),
        AgentLock(),
        lambda _: None,
    )  # type: ignore[dict-item]
    board.card = AgentCard("d", bytes(16), SMALL)
    return board, heard


def test_a_link_that_ends_during_its_dial_is_reported_at_once() -> None:
    link = Mock(transport="tcp", lanes=1)

    def dial(where: str) -> object:
        board.drop_link(link, EndReason.LINK_LOST, "the peer closed the link")
        return link

    board, heard = switchboard(Mock(dial=dial))
    board.dial("h:1")
    dial_again(board)
    assert heard == [("h:1", EndReason.UNREACHABLE, "the peer closed the link")]
    assert len(board) == 0
    assert not board._ended_early
    assert link.close.call_count == 4


def dial_again(board: LinkManager) -> int:
    # Run the postponed connection attempts, including further ones that these postpone.
    #
    # Returns the number of attempts.
    count, timers = 0, board._clock.call_at
    while timers.call_args_list:  # type: ignore[attr-defined]
        calls = list(timers.call_args_list)  # type: ignore[attr-defined]
        timers.reset_mock()  # type: ignore[attr-defined]
        for call in calls:
            count += 1
            call.args[1]()
    return count


def test_a_peer_that_closes_before_its_proof_is_dialled_four_times() -> None:
    links = [Mock(transport="tcp", lanes=1, peer="h:1") for _ in range(5)]
    transport = Mock(dial=Mock(side_effect=links))
    board, heard = switchboard(transport)
    board.dial("h:1")
    for link in links[:4]:
        assert not heard
        board.drop_link(link, EndReason.LINK_LOST, "closed")
        dial_again(board)
    assert heard == [("h:1", EndReason.LINK_LOST, "closed")]
    assert transport.dial.call_count == 4


def test_a_peer_with_another_key_is_not_dialled_again() -> None:
    link = Mock(transport="tcp", lanes=1, peer="h:1")
    transport = Mock(dial=Mock(return_value=link))
    board, heard = switchboard(transport)
    board.dial("h:1")
    board.drop_link(link, EndReason.WRONG_KEY, "invalid seal")
    assert heard == [("h:1", EndReason.WRONG_KEY, "invalid seal")]
    assert not dial_again(board)


def test_a_lane_needs_its_links_transport_and_peer() -> None:
    board, _ = switchboard(Mock())
    stranger, first, lane = (
        PeerLink(
            Mock(transport="tcp", lanes=1),
            LinkSession(KEY, bytes(16), board.card, is_dialler=False),
            None,
            0.0,
        )
        for _ in range(3)
    )
    board._peer_links = {line.link: line for line in (stranger, first, lane)}
    first.session.peer = lane.session.peer = board.card
    stranger.session.greeting = first.session.greeting = lane.session.lane_of = b"g" * 16
    assert board._lane_owner(lane) is first
    assert board._lane_error(lane) is None
    assert len(board) == 2
    lane.link.transport = "rdma"
    assert board._lane_error(lane) == (
        EndReason.LINK_LOST,
        "the link of this lane (parallel connection) is not open",
    )


def test_a_peer_whose_lanes_come_and_go_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board, _ = switchboard(Mock())
    first = up(board, proven(board.card))
    for _ in range(10):
        lane = up(board, proven(board.card, b"g" * 16))
        lane.lane_owner = first
        first.lanes.append(lane)
        board.drop_link(lane.link, EndReason.LINK_LOST, "gone")
        board._clock.call_at.call_args.args[1]()  # type: ignore[attr-defined]
    assert caplog.text.count("a lane (parallel link) to") == 3


def up(board: LinkManager, session: LinkSession, dialling: DialRequest | None = None) -> PeerLink:
    line = PeerLink(
        Mock(transport="tcp", lanes=3, received_bytes=0, has_carried_windows=False),
        session,
        dialling,
        0.0,
    )
    line.is_proven = line.is_in_use = True
    board._peer_links[line.link] = line
    return line


def proven(peer: AgentCard, lane_of: bytes = b"") -> LinkSession:
    session = LinkSession(KEY, bytes(16), peer, is_dialler=True, lane_of=lane_of)
    session.peer = peer
    return session


def test_lanes_are_dialled_only_for_a_link_that_is_in_use() -> None:
    transport = Mock(dial=Mock(side_effect=TransportError("no")))
    board, _ = switchboard(transport)
    line = up(board, proven(board.card), DialRequest(transport, "h:1", "h:1"))
    line.is_in_use = False
    board._handle(line, Beat(), 0.0)
    transport.dial.assert_not_called()
    line.is_in_use = True
    board._handle(line, Beat(), 0.0)
    transport.dial.assert_called_once_with("h:1")


def test_only_one_lane_is_dialled_at_a_time() -> None:
    transport = Mock(dial=Mock(side_effect=TransportError("no")))
    board, _ = switchboard(transport)
    line = up(board, proven(board.card), DialRequest(transport, "h:1", "h:1"))
    line.is_dialling_lane = True
    board._retry_lane(line, "lost")
    transport.dial.assert_not_called()
    line.is_dialling_lane = False
    board._retry_lane(line, "lost")
    transport.dial.assert_called_once_with("h:1")
    del board._peer_links[line.link]
    board._retry_lane(line, "lost")
    transport.dial.assert_called_once_with("h:1")


def test_lanes_that_cannot_be_dialled_are_given_up_in_the_end() -> None:
    transport = Mock(dial=Mock(side_effect=TransportError("no")))
    board, _ = switchboard(transport)
    line = up(board, proven(board.card), DialRequest(transport, "h:1", "h:1"))
    board._dial_lane(line)
    for _ in range(5):
        board._clock.call_at.call_args.args[1]()  # type: ignore[attr-defined]
    assert transport.dial.call_count == 3


@pytest.mark.parametrize("used", [True, False])
def test_a_silent_lane_is_lost_and_so_is_its_link_if_the_lane_was_used(used: bool) -> None:
    board, _ = switchboard(Mock())
    first, lane = up(board, proven(board.card)), up(board, proven(board.card, b"g" * 16))
    lane.lane_owner, lane.link.has_carried_windows = first, used  # type: ignore[attr-defined]
    lane.has_received = first.is_dialling_lane = True  # the next lane is being dialled
    first.lanes.append(lane)
    first.link.received_bytes = 1
    board._check_heartbeats(0.0)
    assert [line.link.send.call_count for line in (first, lane)] == [1, 1]  # type: ignore[attr-defined]
    first.link.received_bytes = 2
    board._clock.now = lambda: 0.75  # type: ignore[method-assign]
    board._clock.call_at.reset_mock()  # type: ignore[attr-defined]
    board._check_heartbeats(0.75)
    lane.link.close.assert_called_once_with()  # type: ignore[attr-defined]
    assert list(board._peer_links) == [first.link]
    assert first.is_dialling_lane
    assert board._sink.retire_link.call_count == used  # type: ignore[attr-defined]
    (then, end), *_ = (call.args for call in board._clock.call_at.call_args_list)  # type: ignore[attr-defined]
    assert then == pytest.approx(0.75 + 0.75)
    end()
    assert list(board._peer_links) == ([] if used else [first.link])


@pytest.mark.parametrize("astray", [True, False])
def test_a_lane_to_another_peer_or_of_a_lost_link_is_closed(astray: bool) -> None:
    board, _ = switchboard(Mock())
    there = msgspec.structs.replace(board.card, epoch=b"e" * 16)
    first = up(board, proven(there))
    lane = up(
        board,
        proven(board.card if astray else there, b"g" * 16),
        DialRequest(Mock(), "h:1", "h:1", lane_of=first),
    )
    if not astray:
        del board._peer_links[first.link]
    lane.is_proven = lane.is_in_use = False
    board._on_proven(lane)
    lane.link.close.assert_called_once_with()  # type: ignore[attr-defined]
    first.link.add_lane.assert_not_called()  # type: ignore[attr-defined]
    assert lane.link not in board._peer_links
    assert board._stats.refused == {EndReason.UNREACHABLE if astray else EndReason.LINK_LOST: 1}


def test_a_silent_peer_is_dropped_with_the_exceeded_limit_as_reason() -> None:
    board, heard = switchboard(
        Mock(dial=lambda where: Mock(transport="tcp", lanes=1, received_bytes=0))
    )
    board.dial("h:1")
    board._clock.now = lambda: 2.5  # type: ignore[method-assign]
    board._check_heartbeats(2.5)
    assert heard == [("h:1", EndReason.SILENT, "the agent was silent for 2.0 s")]


def test_any_error_in_a_dial_is_reported() -> None:
    board, heard = switchboard(Mock(dial=Mock(side_effect=AttributeError("a bug"))))
    board.dial("h:1")
    assert heard == [("h:1", EndReason.UNREACHABLE, "a bug")]


def test_a_peer_whose_message_waits_for_us_is_not_silent() -> None:
    line = PeerLink(
        FakeLink(),
        LinkSession(KEY, bytes(16), AgentCard("p", bytes(16), SMALL), is_dialler=False),
        None,
        0.0,
    )  # type: ignore[arg-type]
    line.is_proven = line.is_handling = True
    assert not line.is_silent(100.0, 0.0, AgentOptions())
    line.is_handling = False
    assert not line.is_silent(100.5, 0.0, AgentOptions())
    assert line.is_silent(101.0, 0.0, AgentOptions())


def test_a_stall_of_our_own_does_not_excuse_later_silence() -> None:
    link = FakeLink()
    line = PeerLink(
        link,
        LinkSession(KEY, bytes(16), AgentCard("p", bytes(16), SMALL), is_dialler=False),
        None,
        0.0,
    )  # type: ignore[arg-type]
    line.is_proven, link.received_bytes = True, 1
    assert not line.is_silent(10.0, 9.0, AgentOptions())
    assert line.is_silent(11.0, 0.0, AgentOptions())


class MisleadingShm(Shm):
    """A shared memory transport that connects to the wrong agent.

    This happens if two hosts both use the address 127.0.0.1.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._wrong = address

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        super().start(owner, regions)
        return self._wrong


async def started(name: str, *ways: Tcp | Shm) -> Group:
    agent_group = group(name, SMALL, list(ways), options=PATIENT)
    await agent_group.agent.start()
    return agent_group


async def test_a_better_link_to_another_agent_is_not_used() -> None:
    other_way = Shm()
    other = await started("other", Tcp(), other_way)
    meant = await started(
        "meant", Tcp(), MisleadingShm(other.agent._link_manager.card.addresses["shm"])
    )
    sink = await started("d", Tcp(), Shm())
    other.agent.offer("r", [1], 16, public=True)
    offer = meant.agent.offer("r", [1], 16, public=True)
    end = await asyncio.wait_for(
        sink.agent.fetch(meant.agent.address, "r", [1], 16).wait_ended(), PATIENCE_S
    )
    assert (end.has_landed, end.transport) == (True, "tcp")
    assert (await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)).has_landed
    assert sink.agent.stats()["faults"] == {"fallback": 1}
    for member in (sink, meant, other):
        await member.agent.close()


class SlowDialShm(Shm):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.dialling, self.go, self._fails = threading.Event(), threading.Event(), fails

    def dial(self, address: str) -> Link:
        first = not self.dialling.is_set()
        self.dialling.set()
        assert self.go.wait(PATIENCE_S)
        if first and self._fails:
            raise TransportError("the test's transport has no memory for the connection")
        return super().dial(address)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_better_link_is_closed_if_the_link_that_led_to_it_was_lost(fails: bool) -> None:
    # Transfers that waited for it have ended; later ones wait for another link.
    late = SlowDialShm(fails)
    source, sink = await started("p", Tcp(), Shm()), await started("d", Tcp(), late)
    source.agent.offer("r", [1], 16, public=True)
    landing = sink.agent.fetch(source.agent.address, "r", [1], 16)
    assert await asyncio.to_thread(late.dialling.wait, PATIENCE_S)
    (lost,) = sink.agent._link_manager._peer_links
    sink.agent.on_lost(lost, "gone")
    assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).reason is EndReason.LINK_LOST
    again = sink.agent.fetch(source.agent.address, "r", [1], 16)
    late.go.set()
    end = await asyncio.wait_for(again.wait_ended(), PATIENCE_S)
    assert (end.has_landed, end.transport) == (True, "shm")
    await until(lambda: sink.agent.stats()["links"] == 1)
    for member in (sink, source):
        await member.agent.close()


@pytest.mark.parametrize("sink_loses", [True, False])
async def test_a_link_that_is_lost_while_its_peer_proves_itself_does_not_come_up(
    sink_loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The heartbeat finds it silent while its thread handles the last handshake message.
    answer, hit = LinkSession.handle, threading.Event()
    async with groups("inproc", SMALL, SMALL, options=[PATIENT, PATIENT]) as (source, sink):
        here = (sink if sink_loses else source).agent
        source.agent.offer("r", [2], 16, public=True)

        def loses(session: LinkSession, data: bytes) -> tuple[Message | None, bytes | None]:
            answered = answer(session, data)
            if session.peer is not None and session.is_dialler is sink_loses and not hit.is_set():
                hit.set()
                (link,) = here._link_manager._peer_links
                here.on_lost(link, "silent")
            return answered

        monkeypatch.setattr(LinkSession, "handle", loses)
        lost = sink.agent.fetch(source.agent.address, "r", [1], 16)
        end = await asyncio.wait_for(lost.wait_ended(), PATIENCE_S)
        # The sink dials again while it has used no link for it.
        assert end.has_landed if sink_loses else end.reason is EndReason.LINK_LOST
        source.agent.offer("s", [1], 16, public=True)
        landing = sink.agent.fetch(source.agent.address, "s", [1], 16)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed
        assert list(source.agent._source._send_queues) == list(
            source.agent._link_manager._peer_links
        )


async def test_dialled_links_do_not_count_as_unproven() -> None:
    async with groups(
        "tcp", SMALL, SMALL, options=[AgentOptions(max_unproven_links=1, handshake_s=15.0), PATIENT]
    ) as (one, two):
        with socket.create_server(("127.0.0.1", 0)) as mute:
            waits = one.agent.fetch(f"127.0.0.1:{mute.getsockname()[1]}", "r", [1], 16)
            await until(lambda: bool(one.agent.stats()["links"]))
            one.agent.offer("r", [1], 16, public=True)
            assert (
                await asyncio.wait_for(
                    two.agent.fetch(one.agent.address, "r", [2], 16).wait_ended(), PATIENCE_S
                )
            ).has_landed
            waits.cancel()


async def test_heartbeats_continue_after_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fails(line: PeerLink, *_: object) -> bool:
        if line.dial_request is not None or failed.is_set():
            return False
        failed.set()
        raise RuntimeError("the test lets the first call fail")

    brisk = AgentOptions(beat_s=0.02, max_missed_beats=500)
    async with groups("tcp", SMALL, SMALL, options=[brisk, brisk]) as (source, sink):
        offer = source.agent.offer("r", [1], 16, ready_layers=0, public=True)
        landing = sink.agent.fetch(source.agent.address, "r", [2], 16)
        await until(lambda: bool(source.agent.stats()["leases"]["claimed"]))
        (link,) = sink.agent._link_manager._peer_links
        monkeypatch.setattr(PeerLink, "is_silent", fails)
        assert await asyncio.to_thread(failed.wait, PATIENCE_S)
        heard = link.received_bytes
        await until(lambda: link.received_bytes > heard + 100)
        offer.mark_ready(SMALL.layers)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed


async def test_after_a_link_without_a_thread_the_next_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process at its thread limit must be able to accept links later.
    start, refused = threading.Thread.start, threading.Event()

    def no_more(thread: threading.Thread) -> None:
        if thread.name.startswith("kv-tcp-127.0.0.1"):
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    async with groups("tcp", SMALL, SMALL) as (source, sink):
        host, _, port = source.agent.address.rpartition(":")
        monkeypatch.setattr(threading.Thread, "start", no_more)
        with socket.create_connection((host, int(port))) as sock:
            assert await asyncio.to_thread(refused.wait, PATIENCE_S)
            assert await asyncio.to_thread(sock.recv, 1) == b""
        monkeypatch.undo()
        source.agent.offer("r", [1], 16, public=True)
        landing = sink.agent.fetch(source.agent.address, "r", [2], 16)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed


async def test_without_a_thread_to_dial_a_landing_ends_and_the_next_one_dials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with groups("tcp", SMALL, SMALL) as (source, sink):
        source.agent.offer("r", [1], 16, public=True)

        def run_in_thread(clock: ThreadClock, call: object) -> NoReturn:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(ThreadClock, "run_in_thread", run_in_thread)
        end = await asyncio.wait_for(
            sink.agent.fetch(source.agent.address, "r", [2], 16).wait_ended(), PATIENCE_S
        )
        assert end.reason is EndReason.UNREACHABLE
        monkeypatch.undo()
        landing = sink.agent.fetch(source.agent.address, "r", [2], 16)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed


@pytest.mark.parametrize(
    "words", [{"name": ""}, {"name": "x" * 257}, {"name": "\ud800"}, {"ticket": "t" * 1025}]
)
async def test_unencodable_text_ends_no_link(words: dict[str, str]) -> None:
    async with groups("inproc", SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [1], 16, ready_layers=0, public=True)
        landing = sink.agent.fetch(source.agent.address, "r", [2], 16)
        with pytest.raises(ValueError, match=r"characters|surrogates"):
            sink.agent.fetch(
                source.agent.address, words.get("name", "n"), [3], 16, ticket=words.get("ticket")
            )
        offer.mark_ready(SMALL.layers)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed
