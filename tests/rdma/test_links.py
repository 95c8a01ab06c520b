"""Tests of connections over real RDMA devices: arrival, order, and writes that a device refuses."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtransfer.transport_interface import TransportError, WindowVerdict
from kvtransfer.transports.rdma.link import RdmaOptions
from kvtransfer.transports.rdma.transport import Rdma
from tests.rdma.connection_ends import BLOCK, LinkedEnds, runs


def test_scattered_blocks_arrive_in_their_places_and_nowhere_else(ends: LinkedEnds) -> None:
    rng = np.random.default_rng(7)
    pieces = runs(rng.permutation(64)[:40], rng.permutation(64)[:40], 3000)
    ends.reserve(1, pieces, (pieces.dst // BLOCK).tolist())
    for first in range(0, 40, 8):
        ends.put(1, pieces, first, 8)
    ends.sink.wait("landed", 1, times=5)
    assert ends.sink.count("landed", 1, 0, WindowVerdict.OK) == 1
    assert {event[3] for event in ends.sink.heard if event[0] == "landed"} == {WindowVerdict.OK}
    assert ends.source.count("sent", 1) == 5
    assert ends.arrived(pieces)


def test_pieces_adjacent_at_the_sink_are_gathered(ends: LinkedEnds) -> None:
    pieces = runs(range(62, 22, -1), range(40))
    ends.reserve(1, pieces, range(40))
    ends.put(1, pieces, 0, 40)
    ends.sink.wait("landed", 1, 0, WindowVerdict.OK)
    assert ends.arrived(pieces)


def test_more_runs_than_keys_are_staged_and_copied_into_place() -> None:
    ends = LinkedEnds(options=RdmaOptions(most_keys=4))
    pieces = runs(range(20), range(1, 41, 2))
    ends.reserve(1, pieces, range(1, 41, 2))
    for first in range(0, 20, 5):
        ends.put(1, pieces, first, 5)
    ends.sink.wait("landed", 1, times=4)
    assert ends.arrived(pieces)
    ends.close()


def test_messages_keep_their_order_among_windows(ends: LinkedEnds) -> None:
    pieces = runs(range(8), range(8))
    ends.reserve(1, pieces, range(8))
    for first in range(8):
        ends.far.send(b"before %d" % first)
        ends.put(1, pieces, first, 1)
    ends.far.send(b"end")
    ends.sink.wait("message", b"end")
    order = [event[1] if event[0] == "message" else event[2] for event in ends.sink.heard]
    assert order == [item for first in range(8) for item in (b"before %d" % first, first)] + [
        b"end"
    ]
    ends.near.send(b"back")
    ends.source.wait("message", b"back")


def test_a_window_whose_blocks_change_owner_while_it_is_read_is_stale(ends: LinkedEnds) -> None:
    pieces = runs(range(4), range(4))
    ends.reserve(1, pieces, range(4))
    answers = iter([True, False])
    ends.put(1, pieces, 0, 2, lambda: next(answers))
    ends.put(1, pieces, 2, 2, lambda: False)
    ends.sink.wait("landed", 1, 0, WindowVerdict.STALE)
    ends.sink.wait("landed", 1, 2, WindowVerdict.STALE)
    assert not ends.place.bytes[2 * BLOCK :].any()  # the second window was not written


def test_bytes_that_differ_from_what_the_source_read_are_corrupt(
    ends: LinkedEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.transports.rdma.sender.digest_of", lambda *_: 1)
    pieces = runs(range(4), range(4))
    ends.reserve(1, pieces, range(4))
    ends.put(1, pieces, 0, 4)
    ends.sink.wait("landed", 1, 0, WindowVerdict.CORRUPT)


def test_the_device_refuses_a_write_after_the_fence_and_other_transfers_continue(
    ends: LinkedEnds,
) -> None:
    late, other = runs(range(8), range(8)), runs(range(20, 28), range(20, 28))
    ends.reserve(1, late, range(8))
    ends.reserve(2, other, range(20, 28))
    requested, fenced = threading.Event(), threading.Event()

    def current() -> bool:
        requested.set()
        return fenced.wait(20.0)

    ends.put(1, late, 0, 8, current)
    ends.put(2, other, 0, 8)
    assert requested.wait(20.0)
    ends.near.fence(1)
    ends.sink.wait("fenced", 1)
    fenced.set()
    ends.sink.wait("landed", 2, 0, WindowVerdict.OK)
    ends.source.wait("sent", 1, 0)
    assert ends.far.refused_writes == 1  # type: ignore[attr-defined]
    assert ends.sink.count("landed", 1) == 0
    assert ends.arrived(other)  # all bytes of transfer 2 arrived, and none of transfer 1


def test_a_window_outside_of_the_grant_is_not_written(ends: LinkedEnds) -> None:
    pieces = runs(range(4), range(4))
    ends.reserve(1, pieces, range(3))
    ends.put(1, pieces, 0, 4)
    ends.sink.wait("landed", 1, 0, WindowVerdict.STALE)
    assert not ends.place.bytes.any()


def test_dropped_windows_are_not_sent_or_end_stale(ends: LinkedEnds) -> None:
    pieces = runs(range(8), range(8))
    ends.reserve(1, pieces, range(8))
    requested, go = threading.Event(), threading.Event()

    def current() -> bool:
        requested.set()
        return go.wait(20.0)

    ends.put(1, pieces, 0, 1, current)
    ends.put(1, pieces, 1, 7)
    assert requested.wait(20.0)
    ends.far.drop(1)
    ends.far.send(b"dropped")
    go.set()
    ends.sink.wait("message", b"dropped")
    assert {event[3] for event in ends.sink.heard if event[0] == "landed"} <= {WindowVerdict.STALE}
    assert ends.sink.heard[-1] == ("message", b"dropped")


def test_a_closed_peer_is_reported_lost_and_a_later_fence_is_answered(ends: LinkedEnds) -> None:
    pieces = runs(range(4), range(4))
    ends.reserve(1, pieces, range(4))
    ends.far.close()
    ends.sink.wait("lost")
    ends.near.fence(1)
    ends.sink.wait("fenced", 1)
    assert ends.source.count("lost") == 0


def test_an_address_without_a_listener_is_a_transport_error(ends: LinkedEnds) -> None:
    with pytest.raises(TransportError, match="cannot be reached"):
        ends.transports[1].dial("127.0.0.1:1")


def test_an_rdma_device_is_available() -> None:
    assert Rdma.unavailable() is None
    assert Rdma.unavailable("mlx5_77") is not None
