"""What NIXL lets a peer do to memory, as our staging supposes it, and what of that is left once a link ends."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from kvtransfer.lattice import Runs
from kvtransfer.transports import nixl
from kvtransfer.transports.base import TransportError, Verdict
from kvtransfer.transports.nixl_arena import Arena, Writer
from tests.contract.kvtransfer.links import (
    BLOCK_BYTES,
    BLOCKS,
    PATIENCE_S,
    expected,
    linked_pair,
    scattered,
    window,
)

SLOT_BYTES = 64 << 10


@contextmanager
def both() -> Iterator[tuple[Arena, Writer]]:
    arena = Arena(2, SLOT_BYTES)
    writer = Writer(arena.grant)
    try:
        yield arena, writer
    finally:
        writer.close()
        arena.close()


def eventually(holds: Callable[[], object], between: Callable[[], object] = lambda: time.sleep(0.001)) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        between()


def listening() -> int:
    """Sockets on which this process listens."""
    said = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return said.count(f"pid={os.getpid()},")


def test_nothing_is_written_while_the_sink_does_not_ask_for_it() -> None:
    with both() as (arena, writer):
        writer.slot(0, SLOT_BYTES)[:] = 7
        writer.post(0, SLOT_BYTES, 1)
        for _ in range(1000):
            assert not writer.done(1)
        assert not arena.memory.any()
        arena.post(1, 0)
        eventually(lambda: arena.written(1), lambda: writer.done(1) if 1 in writer._handles else None)
        assert (arena.slot(0, SLOT_BYTES) == 7).all()
        assert not arena.slot(1, SLOT_BYTES).any()


def test_nixl_writes_deregistered_memory_which_is_why_no_block_is_ever_registered() -> None:
    """Should this fail one day, NIXL fences by itself, and windows could go straight to their blocks."""
    with both() as (arena, writer):
        arena._agent.deregister_memory(arena._registered)
        writer.slot(1, SLOT_BYTES)[:] = 9
        writer.post(1, SLOT_BYTES, 5)
        eventually(lambda: arena.written(5), lambda: writer.done(5) if 5 in writer._handles else None)
        assert (arena.slot(1, SLOT_BYTES) == 9).all()


def test_without_its_agent_an_arena_cannot_be_written() -> None:
    with both() as (arena, writer):
        memory = arena.memory
        writer.slot(0, SLOT_BYTES)[:] = 7
        writer.post(0, SLOT_BYTES, 1)
        arena.close()
        with suppress(TransportError):  # over, with an error or not yet known to be
            for _ in range(1000):
                writer.done(1)
        with pytest.raises(TransportError):
            eventually(lambda: writer.post(1, SLOT_BYTES, 2) or writer.done(2))
        assert not memory.any()


def test_a_link_that_ends_leaves_no_listener_of_nixls_and_no_descriptor() -> None:
    with linked_pair("nixl"):
        pass  # what the libraries open once and for all is open now
    sockets, descriptors = listening(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with linked_pair("nixl") as pair:
            moves = scattered(3, 10, 4096)
            head = window(1, moves)
            pair.expect({head: moves})
            pair.admit(1)
            pair.put(head, moves)
            pair.hears.wait("landed")
    eventually(lambda: listening() == sockets)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-nixl")]


@pytest.mark.parametrize("junk", [b"", bytes(16), bytes(40), np.random.default_rng(1).bytes(300), bytes(1 << 15)])
def test_what_is_no_grant_is_refused_in_words(junk: bytes) -> None:
    with pytest.raises(TransportError):
        Writer(junk)


@pytest.mark.parametrize("count", [1, 5])
def test_a_window_that_no_slot_holds_arrives_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single runs are never cut by a plan, however long."""
    size = BLOCKS * BLOCK_BYTES // count - 1000
    at = np.arange(count) * (size + 900)
    moves = Runs(at, at[::-1].copy() + 37, np.full(count, size))
    head = window(1, moves)
    monkeypatch.setattr(nixl, "SLOT_BYTES", 100_000)
    with linked_pair("nixl") as pair:
        pair.expect({head: moves})
        pair.admit(1)
        pair.put(head, moves)
        assert pair.hears.wait("landed") == [(head, Verdict.OK)]
        assert pair.gives.wait("sent") == [head]
        assert np.array_equal(pair.into.bytes, expected(pair, moves))
