"""Tests of reading and writing many pieces of memory in one system call: all of them, in order.

If a checksum is computed, a call moves at most as many bytes as fit into the CPU cache.
"""

from __future__ import annotations

import os
import socket
from itertools import pairwise

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.memory_regions import Region
from kvtransfer.transports.iovec import IN_CACHE, NOTHING, Iovecs, MemoryPieces, readv, writev

SIZE = 4 << 20
REGION = Region.over(
    np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8), SIZE, name="memory"
)
cuts = st.lists(st.integers(0, SIZE), min_size=2, max_size=40, unique=True).map(sorted)


@given(cuts, st.booleans())
@settings(max_examples=60, deadline=None)
def test_pieces_are_the_bytes_of_their_runs_however_they_are_cut_for_a_digest(
    ends: list[int], fed: bool
) -> None:
    runs = [(first, last - first) for first, last in list(pairwise(ends))[::2]]
    offsets, lengths = (np.array(column) for column in zip(*runs, strict=True))
    pieces = MemoryPieces.of_window(REGION, offsets, lengths, Iovecs(), fed=fed)
    whole = b"".join(REGION.bytes[index : index + length].tobytes() for index, length in runs)
    assert b"".join(pieces.parts()) == whole
    assert pieces.size == len(whole)
    if fed:
        assert max(map(len, pieces.parts())) <= IN_CACHE
        digest = xxhash.xxh3_64()
        for upto in range(0, len(whole) + IN_CACHE, IN_CACHE):
            pieces.feed(digest.update, min(upto, len(whole)))
        assert digest.digest() == xxhash.xxh3_64_digest(whole)


def test_a_call_for_bytes_that_a_digest_takes_moves_no_more_than_a_cache_holds() -> None:
    offsets, lengths = np.arange(0, SIZE, 64 << 10), np.full(SIZE >> 16, 64 << 10)
    with open("/dev/null", "wb") as nowhere:
        pieces = MemoryPieces.of_window(REGION, offsets, lengths, Iovecs(), fed=True)
        assert pieces.call(writev, nowhere.fileno(), NOTHING, NOTHING) == IN_CACHE
        pieces = MemoryPieces.of_window(REGION, offsets, lengths, Iovecs())
        assert pieces.call(writev, nowhere.fileno(), NOTHING, NOTHING) == SIZE


def test_calls_for_a_digest_are_full_whatever_the_pieces() -> None:
    small, large = np.full(1000, 4 << 10), np.full(3, 513 << 10)
    lengths = np.concatenate([small, large])
    with open("/dev/null", "wb") as nowhere:
        pieces = MemoryPieces.of_window(
            REGION, np.zeros(len(lengths), np.int64), lengths, Iovecs(), fed=True
        )
        counts = []
        while pieces.remaining:
            count = pieces.call(writev, nowhere.fileno(), NOTHING, NOTHING)
            assert count is not None
            pieces.advance(count)
            counts.append(count)
    assert max(counts) <= IN_CACHE
    assert min(counts[-6:]) > IN_CACHE // 3  # slightly more than a cache is split in halves


def test_a_short_call_is_reported_as_short() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        pieces = MemoryPieces.over(np.zeros(SIZE, np.uint8), SIZE, Iovecs())
        count = pieces.call(writev, near.fileno(), NOTHING, NOTHING)
        assert count is not None
        assert 0 < count < SIZE
        assert pieces.was_short
        pieces = MemoryPieces.over(np.zeros(1000, np.uint8), 1000, Iovecs())
        assert pieces.call(readv, far.fileno(), NOTHING, NOTHING) == 1000
        assert not pieces.was_short


def test_what_goes_along_is_asked_for_too() -> None:
    source, sink = os.pipe()
    try:
        os.write(sink, bytes(1500))
        stage = np.zeros(1000, np.uint8)
        pieces = MemoryPieces.over(np.zeros(1000, np.uint8), 1000, Iovecs())
        behind = (int(stage.__array_interface__["data"][0]), stage.size)
        assert pieces.call(readv, source, NOTHING, behind) == 1500
        assert pieces.was_short
    finally:
        os.close(source)
        os.close(sink)
