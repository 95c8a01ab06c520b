"""Tests of KV in many short byte ranges: received in one buffer, verified, then copied."""

from __future__ import annotations

import socket
from itertools import chain, repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.frame import (
    FrameKind,
    PayloadProof,
    encode_frame,
    encode_trailer,
    pack_head,
)
from kvtransfer.transport_interface import WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.copy_runs import gather, is_fine_grained, scatter
from tests.contract.kvtransfer.links import (
    BLOCK_BYTES,
    BLOCKS,
    Owner,
    expected,
    linked_pair,
    window,
)
from tests.unit.kvtransfer.transports.stream.test_links import link_of, stranger

__all__ = ["stranger"]  # a fixture that this module's tests use by name

CELL = 256
SLOTS = BLOCKS * BLOCK_BYTES // CELL


def cells(count: int = 512, seed: int = 5) -> ByteRuns:
    rng = np.random.default_rng(seed)
    src, dst = (rng.permutation(SLOTS)[:count] * CELL for _ in range(2))
    return ByteRuns(src, dst, np.full(count, CELL, np.int64))


@given(st.data(), st.sampled_from([1, 4, 8, 12, 64]))
def test_runs_come_together_and_apart_as_they_were(data: st.DataObject, unit: int) -> None:
    lengths = (
        np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=80)), np.int64) * unit
    )
    gaps = (
        np.array(
            data.draw(st.lists(st.integers(0, 3), min_size=lengths.size, max_size=lengths.size)),
            np.int64,
        )
        * unit
    )
    offsets = np.cumsum(lengths + gaps) - lengths
    order = np.array(data.draw(st.permutations(range(lengths.size))))
    offsets, lengths = offsets[order], lengths[order]
    memory = np.random.default_rng(1).integers(0, 256, int((offsets + lengths).max()) + 3, np.uint8)
    together, heard = np.empty(int(lengths.sum()), np.uint8), list[bytes]()
    gather(memory, offsets, lengths, together, lambda part: heard.append(part.tobytes()))
    wanted = b"".join(memory[a : a + n].tobytes() for a, n in zip(offsets, lengths, strict=True))
    assert together.tobytes() == wanted == b"".join(heard)
    back = np.zeros_like(memory)
    scatter(together, back, offsets, lengths)
    touched = np.zeros(memory.size, bool)
    for index, length in zip(offsets, lengths, strict=True):
        touched[index : index + length] = True
    assert (back[touched] == memory[touched]).all()
    assert not back[~touched].any()


def test_only_many_and_short_runs_are_fine() -> None:
    few, long = cells(64), ByteRuns(*(np.arange(100) * 4096,) * 2, np.full(100, 4096))
    assert [is_fine_grained(runs, runs.n_bytes) for runs in (cells(65), few, long)] == [
        True,
        False,
        False,
    ]


def test_a_window_of_many_short_runs_arrives_as_planned() -> None:
    with linked_pair("tcp") as pair:
        moves = cells()
        head = window(1, moves)
        pair.expect({head: moves})
        pair.put(head, moves)
        assert pair.sink_owner.wait("landed") == [(head, WindowVerdict.OK)]
        assert pair.source_owner.wait("sent") == [head]
        assert np.array_equal(pair.sink_region.bytes, expected(pair, moves))


@pytest.mark.parametrize(
    "answers", [[False], [True, False]], ids=["before", "while they were read"]
)
def test_of_many_short_runs_read_too_late_not_one_byte_is_sent(answers: list[bool]) -> None:
    with linked_pair("tcp") as pair:
        moves, replies = cells(), chain(answers, repeat(False))
        head = window(1, moves)
        pair.expect({head: moves})
        pair.put(head, moves, current=lambda: next(replies))
        assert pair.sink_owner.wait("landed") == [(head, WindowVerdict.STALE)]
        assert not pair.sink_region.bytes.any()
        assert pair.sink.received_bytes < 4096


def begin_window(owner: Owner, region: Region, sock: socket.socket) -> tuple[ByteRuns, WindowHead]:
    # Send all but the last byte of a window of many short runs; return its runs and its head.
    moves = cells()
    head = window(1, moves)
    owner.place = lambda head: WindowSlice(moves, region, 0, 0)
    link_of(owner).secure(bytes(32))
    sock.sendall(
        encode_frame(FrameKind.WINDOW, pack_head(head), moves.n_bytes, PayloadProof.XXH3)
        + b"\1" * (moves.n_bytes - 1)
    )
    owner.wait("incoming")
    return moves, head


def test_short_runs_that_are_not_what_was_sent_are_not_put_into_place(
    stranger: tuple[socket.socket, Owner, Region],
) -> None:
    sock, owner, region = stranger
    _, head = begin_window(owner, region, sock)
    sock.sendall(b"\1" + encode_trailer(WindowVerdict.OK, 12345))
    assert owner.wait("landed") == [(head, WindowVerdict.CORRUPT)]
    assert not region.bytes.any()


def test_short_runs_in_flight_are_discarded_after_a_fence(
    stranger: tuple[socket.socket, Owner, Region],
) -> None:
    sock, owner, region = stranger
    begin_window(owner, region, sock)
    link_of(owner).fence(1)
    assert owner.wait("fenced") == [1]
    sock.sendall(
        b"\1" + encode_trailer(WindowVerdict.OK) + encode_frame(FrameKind.MESSAGE, b"after")
    )
    owner.wait("message")
    assert not region.bytes.any()
    assert not owner.all("landed")
