"""Tests of KV sent over several parallel connections (lanes), in order."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NoReturn
from unittest.mock import Mock

import numpy as np
import pytest

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.protocol.frame import (
    FrameKind,
    PayloadProof,
    encode_frame,
    encode_trailer,
    encode_window_frame,
)
from kvtransfer.transport_interface import WindowHead, WindowSlice, WindowVerdict
from tests.contract.kvtransfer.links import BLOCK_BYTES, Pair, expected, linked_pair, until, window
from tests.unit.kvtransfer.transports.stream.lane_access import laned, lanes_of, standing

A_MOMENT_S = 0.1  # time in which events that must not happen would happen


@pytest.fixture
def pair() -> Iterator[Pair]:
    with linked_pair("lanes") as connected:
        yield connected


def blocks(count: int, first: int = 0) -> dict[WindowHead, ByteRuns]:
    offsets = np.arange(first, first + count) * BLOCK_BYTES
    runs = [
        ByteRuns(offsets[i : i + 1], offsets[i : i + 1], np.array([BLOCK_BYTES]))
        for i in range(count)
    ]
    return {window(1, run, first=first + i): run for i, run in enumerate(runs)}


def begin_transfer(pair: Pair, more: int) -> dict[WindowHead, ByteRuns]:
    # Begin a transfer whose first window the sink has acknowledged; return its other windows.
    windows = blocks(more + 1)
    pair.expect(windows)
    pair.admit(1)
    first, *rest = windows.items()
    pair.put(*first)
    pair.sink_owner.wait("landed")
    until(lambda: 1 in laned(pair.source)._out._shared)
    return dict(rest)

    # ---- which link carries windows


def test_windows_go_by_the_lanes_while_the_first_link_is_busy(pair: Pair) -> None:
    rest = begin_transfer(pair, 9)
    with standing(pair.source):
        for event in rest.items():
            pair.put(*event)
        pair.sink_owner.wait("landed", 9)
        time.sleep(A_MOMENT_S)
        # All windows have landed but the one that the link sends next.
        assert len(pair.sink_owner.all("landed")) == 9
    heard = pair.sink_owner.wait("landed", 10)
    assert {verdict for _, verdict in heard} == {WindowVerdict.OK}  # type: ignore[misc]
    assert {
        event.link for event in pair.sink_owner.heard if event.kind in ("landed", "incoming")
    } == {pair.sink}
    pair.source_owner.wait("sent", 10)
    assert {event.link for event in pair.source_owner.heard if event.kind == "sent"} == {
        pair.source
    }
    assert np.array_equal(pair.sink_region.bytes, expected(pair, *blocks(10).values()))
    went = [lane.received_bytes > BLOCK_BYTES for lane in lanes_of(pair.sink)]
    assert any(went)
    assert [lane.has_carried_windows for lane in lanes_of(pair.sink)] == went
    assert [lane.has_carried_windows for lane in lanes_of(pair.source)] == went
    assert not laned(pair.sink).has_carried_windows


def test_no_window_overtakes_an_earlier_message(pair: Pair) -> None:
    windows = blocks(10)
    pair.expect(windows)
    pair.admit(1)
    with standing(pair.source):
        pair.source.send(b"the announcement")
        for event in windows.items():
            pair.put(*event)
        assert not laned(pair.source)._out.has_spare  # lanes find no window
    pair.sink_owner.wait("landed", 10)
    order = [event.kind for event in pair.sink_owner.heard if event.kind in ("message", "incoming")]
    assert order[0] == "message"


def test_the_sink_sends_spread_before_it_reads_the_first_window(pair: Pair) -> None:
    (head,) = blocks(1)
    pair.expect(blocks(1))
    with standing(pair.sink):
        laned(pair.sink).place_window(head)
        until(lambda: 1 in laned(pair.source)._out._shared)


def test_sleeping_lanes_are_woken_when_windows_may_spread(pair: Pair) -> None:
    windows = blocks(10)
    pair.expect(windows)
    pair.admit(1)
    with standing(pair.source):
        for event in windows.items():
            pair.put(*event)
        laned(pair.source).on_frame(FrameKind.SPREAD, struct.pack("<Q", 1))
        pair.sink_owner.wait("landed", 9)


def test_a_lane_is_called_also_while_it_goes_to_sleep(pair: Pair) -> None:
    lanes = lanes_of(pair.source)
    with standing(pair.source, *lanes):
        laned(pair.source)._out.allow_lanes(1)
        for event in blocks(2).items():
            pair.put(*event)
        assert all(lane._has_lane_work for lane in lanes)
        laned(pair.source)._out.drop(1)


@pytest.mark.parametrize("spins", [True, False])
def test_a_woken_lane_does_not_go_to_sleep(pair: Pair, spins: bool) -> None:
    lane = lanes_of(pair.source)[0]
    with standing(lane):
        lane._poll = Mock(poll=Mock(return_value=[]))
        lane._has_lane_work, lane._spin_s = True, 0.5 if spins else 0.0
        if spins:
            assert lane._busy_poll(lambda: False)
        else:
            lane._await_event(lambda: False)
            lane._poll.poll.assert_not_called()


@pytest.mark.parametrize(("before", "found"), [(63, True), (64, False)])
def test_queueing_a_window_checks_only_the_front_of_the_queue(
    pair: Pair, before: int, found: bool
) -> None:
    # The caller holds the agent's lock at that time.
    ((head, runs),) = blocks(1).items()
    out = laned(pair.source)._out
    with standing(pair.source, *lanes_of(pair.source)):
        for _ in range(before):
            pair.put(head, runs)
        out.allow_lanes(2)
        pair.put(window(2, runs), runs)
        assert out.has_spare is found
        for transfer in (1, 2):
            out.drop(transfer)


def test_a_window_just_taken_by_a_lane_is_not_lost(pair: Pair) -> None:
    out = laned(pair.source)._out

    class Taken:
        looked = 0

        def __bool__(self) -> bool:
            self.looked += 1
            return self.looked == 1

        def popleft(self) -> NoReturn:
            raise IndexError("the test's queue is empty")

    with standing(pair.source):
        queue, out._queue = out._queue, Taken()  # type: ignore[assignment]
        assert not out.send_available()
        out._queue = queue


@pytest.mark.parametrize(
    ("by_sink", "header"), [(False, bytes(8)), (True, bytes(7)), (True, b""), (True, bytes(9))]
)
def test_a_spread_frame_must_be_valid_and_from_the_sink(
    pair: Pair, by_sink: bool, header: bytes
) -> None:
    speaker, hearer = (pair.sink, pair.source_owner) if by_sink else (pair.source, pair.sink_owner)
    laned(speaker)._out.enqueue(encode_frame(FrameKind.SPREAD, header))
    laned(speaker)._wake(always=True)
    assert "SPREAD frame" in str(hearer.wait("lost")[0])


def test_a_source_remembers_the_newest_transfers_that_may_spread(pair: Pair) -> None:
    out = laned(pair.source)._out
    for transfer in range(1000):
        out.allow_lanes(transfer)
    assert len(out._shared) == 256
    assert 999 in out._shared

    # ---- dropped


def test_of_a_dropped_transfer_no_lane_takes_a_window(pair: Pair) -> None:
    rest = begin_transfer(pair, 5)
    source = laned(pair.source)
    with standing(source, *lanes_of(source)):
        for head, runs in rest.items():
            pair.put(head, runs)
        assert source._out.has_spare
        pair.source.drop(1)
        source._out.allow_lanes(1)  # the SPREAD frame arrives late
        assert not source._out.has_spare
        assert source._out.take_spare() is None


def test_dropping_a_transfer_does_not_search_the_queue(pair: Pair) -> None:
    # The caller holds the agent's lock, and may drop thousands of transfers.
    class Waiting(deque[object]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("the queue of windows must not be searched")

    out = laned(pair.source)._out
    with standing(pair.source, *lanes_of(pair.source)):
        out.allow_lanes(1)
        out._queue = Waiting()  # type: ignore[assignment]
        pair.source.drop(1)
        assert out._shared == {}
        out._queue = deque()
    until(lambda: not out._withheld)


def test_of_a_dropped_transfer_no_lane_sends_what_it_has_taken(pair: Pair) -> None:
    rest = begin_transfer(pair, 1)
    lane = lanes_of(pair.source)[0]
    with standing(lane):
        ((head, runs),) = rest.items()
        lane._out.enqueue((head, WindowSlice(runs, pair.source_region, 0, 0, lambda: True)))
        pair.source.drop(1)
    until(lambda: lane._out.is_idle)
    pair.source.send(b"after it")
    pair.sink_owner.wait("message")
    assert len(pair.sink_owner.all("incoming")) == 1

    # ---- fenced


def test_the_fence_is_reported_when_no_lane_writes_any_more(pair: Pair) -> None:
    last = lanes_of(pair.sink)[-1]
    with standing(last):
        pair.sink.fence(1)
        time.sleep(A_MOMENT_S)
        assert pair.sink_owner.all("fenced") == []
    assert pair.sink_owner.wait("fenced") == [1]


def test_a_link_that_is_lost_has_its_fence_when_no_lane_writes_any_more(pair: Pair) -> None:
    last = lanes_of(pair.sink)[-1]
    with standing(last):
        laned(pair.source)._sock.shutdown(socket.SHUT_RDWR)
        pair.sink_owner.wait("lost")
        pair.sink.fence(1)
        time.sleep(A_MOMENT_S)
        assert pair.sink_owner.all("fenced") == []
    assert pair.sink_owner.wait("fenced") == [1]


def test_a_lane_that_has_ended_keeps_no_fence_waiting_and_needs_no_thread_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = lanes_of(pair.sink)
    for lane in lanes:
        lane.close()
        lane.join()
    laned(pair.sink)._lane_links = lanes  # the lanes are those that a fence saw when it began

    def no_more(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    pair.sink.fence(1)
    assert pair.sink_owner.wait("fenced") == [1]


def test_a_lane_writes_no_more_into_what_is_fenced(pair: Pair) -> None:
    ((head, runs),) = blocks(1).items()
    pair.expect({head: runs})
    data = pair.source_region.bytes[:BLOCK_BYTES].tobytes()
    opening, closing = (
        encode_window_frame(head, BLOCK_BYTES, PayloadProof.NONE),
        encode_trailer(WindowVerdict.OK),
    )
    far = lanes_of(pair.source)[0]
    with standing(far):
        far._sock.sendall(opening + data[: BLOCK_BYTES // 2])
        pair.sink_owner.wait("incoming")
        pair.sink.fence(1)
        pair.sink_owner.wait("fenced")
        pair.sink_region.bytes[:] = 7
        far._sock.sendall(data[BLOCK_BYTES // 2 :] + closing)
    far.send(b"after it")
    pair.sink_owner.wait("message")
    assert (pair.sink_region.bytes == 7).all()
    assert pair.sink_owner.all("landed") == []


def test_a_sink_forgets_with_the_fence_that_a_transfer_may_spread(pair: Pair) -> None:
    begin_transfer(pair, 0)
    assert laned(pair.sink)._spread == {1}
    pair.sink.fence(1)
    pair.sink_owner.wait("fenced")
    assert laned(pair.sink)._spread == set()

    # ---- a lane's own events


def test_messages_and_the_end_of_a_lane_are_its_own(pair: Pair) -> None:
    far, near = lanes_of(pair.source)[0], lanes_of(pair.sink)[0]
    far.send(b"a word")
    pair.sink_owner.wait("message")
    far._sock.shutdown(socket.SHUT_RDWR)
    pair.sink_owner.wait("lost")
    pair.source_owner.wait("lost")
    assert [event.link for event in pair.sink_owner.heard if event.kind in ("message", "lost")] == [
        near,
        near,
    ]
    assert [event.link for event in pair.source_owner.heard if event.kind == "lost"] == [far]
    rest = begin_transfer(pair, 9)
    for event in rest.items():
        pair.put(*event)
    pair.sink_owner.wait("landed", 10)
    pair.sink.fence(1)
    assert pair.sink_owner.wait("fenced") == [1]


def test_a_lane_that_has_ended_is_forgotten(pair: Pair) -> None:
    gone, stays = lanes_of(pair.sink)
    gone.close()
    gone.join()
    assert lanes_of(pair.sink) == (stays,)
