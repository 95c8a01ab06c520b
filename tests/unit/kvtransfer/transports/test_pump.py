"""Tests of the pump, C code that moves KV bytes: its checksums, and when a call returns."""

from __future__ import annotations

import importlib
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.protocol.frame import TRAILER_BYTES
from kvtransfer.transports import pump
from kvtransfer.transports.iovec import NOTHING, Iovecs, MemoryPieces, address_of
from kvtransfer.transports.pump import (
    PUMP,
    Digest,
    PumpCalls,
    PumpFunctions,
    clear_eventfd,
    ring_eventfd,
)
from kvtransfer.transports.stream.window_batch import FRAME_BYTES, WindowBatch
from tests.unit.kvtransfer.interpreter_lock import keeps_interpreter_lock

HAS_COMPILER = (
    shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()
)
needs_pump = pytest.mark.skipif(PUMP is None, reason="the pump is not compiled")


class Ends:
    """Two connected sockets for tests: the pump (C code) writes to one, reads from the other."""

    def __init__(self, pump: PumpFunctions) -> None:
        self.near, self.far = socket.socketpair()
        for sock in (self.near, self.far):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        self.bell = os.eventfd(0)
        self.writing = PumpCalls(pump, self.near.fileno(), self.bell, is_writing=True)
        self.reading = PumpCalls(pump, self.far.fileno(), self.bell)

    def close(self) -> None:
        self.near.close()
        self.far.close()
        os.close(self.bell)


@pytest.fixture
def ends() -> Iterator[Ends]:
    assert PUMP is not None
    both = Ends(PUMP)
    yield both
    both.close()


def pieces(memory: np.ndarray, cuts: list[int]) -> MemoryPieces:
    # Return the whole memory in pieces that end at the cuts and at its end.
    ends = np.array([*cuts, memory.size], np.int64)
    starts = np.array([0, *cuts], np.int64)
    return MemoryPieces(memory, address_of(memory), starts, ends - starts, Iovecs())


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler and Python's headers")
@pytest.mark.skipif(os.environ.get("PENSTOCK_KV_PUMP") == "off", reason="the pump is off")
def test_a_checkout_with_a_compiler_has_the_pump() -> None:
    assert PUMP is not None


@needs_pump
def test_a_pump_of_another_interface_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native = importlib.import_module("kvtransfer.transports._pump")
    assert pump._load() is not None
    monkeypatch.setattr(native, "INTERFACE", pump.INTERFACE - 1)
    assert pump._load() is None
    monkeypatch.delattr(native, "INTERFACE")  # as compiled from the first versions
    assert pump._load() is None


@needs_pump
@given(st.binary(max_size=3000), st.lists(st.integers(0, 3000), max_size=5))
def test_the_digest_equals_that_of_the_xxhash_module(data: bytes, cuts: list[int]) -> None:
    digest, start = Digest(), 0
    for end in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        digest.update(memoryview(data)[start:end])
        start = end
    assert digest.intdigest() == xxhash.xxh3_64_intdigest(data)


@needs_pump
@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 2_000_000),
    out_cuts=st.lists(st.floats(0.001, 0.999), max_size=80, unique=True),
    in_cuts=st.lists(st.floats(0.001, 0.999), max_size=80, unique=True),
    ahead=st.integers(0, 40),
    behind=st.integers(0, 40),
    data=st.data(),
)
def test_all_bytes_arrive_in_order_with_the_same_digest_at_both_ends(
    size: int,
    out_cuts: list[float],
    in_cuts: list[float],
    ahead: int,
    behind: int,
    data: st.DataObject,
) -> None:
    optional = data.draw(st.integers(0, behind))
    assert PUMP is not None
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    sink, head, tail = (np.zeros(length, np.uint8) for length in (size, 40, 40))
    head[:] = 7
    both = Ends(PUMP)
    try:
        sent, received = Digest(), Digest()
        out = pieces(source, sorted({int(cut * size) for cut in out_cuts} - {0}))
        inn = pieces(sink, sorted({int(cut * size) for cut in in_cuts} - {0}))
        left = ahead
        before = np.zeros(max(1, ahead), np.uint8)
        got_before = got_behind = 0
        written_tail = 0
        while inn.remaining or got_behind < behind - optional:
            if out.remaining:
                start = (address_of(head) + ahead - left, left) if left else NOTHING
                count = out.move(both.writing, start, NOTHING, 0, sent) or 0
                left, count = left - min(left, count), count - min(left, count)
                out.advance(count)
            with suppress(BlockingIOError):  # either socket may be full or empty for a moment
                if not out.remaining and written_tail < behind:
                    written_tail += both.near.send(bytes([9]) * (behind - written_tail))
            with suppress(BlockingIOError):
                if got_before < ahead:
                    got_before += both.far.recv_into(memoryview(before)[got_before:ahead])
                elif inn.remaining:
                    rest = (address_of(tail), behind) if behind else NOTHING
                    count = inn.move(both.reading, NOTHING, rest, optional, received) or 0
                    got_behind = max(0, count - inn.remaining)
                    inn.advance(min(count, inn.remaining))
                else:
                    got_behind += both.far.recv_into(memoryview(tail)[got_behind:behind])
    finally:
        both.close()
    assert np.array_equal(source, sink)
    assert set(before[:ahead].tolist()) <= {7}
    assert set(tail[:got_behind].tolist()) <= {9}
    assert sent.intdigest() == received.intdigest() == xxhash.xxh3_64_intdigest(source.tobytes())


@needs_pump
def test_a_call_without_patience_returns_at_once(ends: Ends) -> None:
    assert pieces(np.zeros(10, np.uint8), []).move(ends.reading, NOTHING, NOTHING, 0, None) is None


@needs_pump
def test_the_end_of_the_stream_is_zero_bytes(ends: Ends) -> None:
    ends.near.close()
    assert pieces(np.zeros(10, np.uint8), []).move(ends.reading, NOTHING, NOTHING, 0, None) == 0


@needs_pump
def test_bytes_before_the_end_of_the_stream_come_first(ends: Ends) -> None:
    ends.near.send(b"abc")
    ends.near.close()
    memory = np.zeros(10, np.uint8)
    one = pieces(memory, [])
    assert one.move(ends.reading, NOTHING, NOTHING, 0, None) == 3
    one.advance(3)
    assert one.move(ends.reading, NOTHING, NOTHING, 0, None) == 0
    assert bytes(memory[:3]) == b"abc"


@needs_pump
def test_a_broken_connection_raises(ends: Ends) -> None:
    ends.far.close()
    with pytest.raises(BrokenPipeError):
        pieces(np.zeros(10, np.uint8), []).move(ends.writing, NOTHING, NOTHING, 0, None)


@needs_pump
@pytest.mark.parametrize("is_writing", [False, True])
def test_the_bell_ends_a_wait(ends: Ends, is_writing: bool) -> None:
    calls = ends.writing if is_writing else ends.reading
    calls.patience_ms = 60_000
    timer = threading.Timer(0.02, os.eventfd_write, (ends.bell, 1))
    timer.start()
    moved = pieces(np.zeros(1 << 20, np.uint8), []).move(calls, NOTHING, NOTHING, 0, None)
    timer.join()
    assert calls.was_stopped
    assert (moved or 0) < 1 << 20


@needs_pump
def test_a_message_of_the_peer_ends_the_wait_for_room(ends: Ends) -> None:
    ends.writing.patience_ms = 60_000
    ends.far.send(b"credit")
    moved = pieces(np.zeros(1 << 20, np.uint8), []).move(ends.writing, NOTHING, NOTHING, 0, None)
    assert not ends.writing.was_stopped
    assert 0 < (moved or 0) < 1 << 20


@needs_pump
@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_goes_on_while_a_message_of_the_peer_waits(ends: Ends, count: int) -> None:
    # The pump waits up to 100 ms. On a busy machine they may pass while other threads run, so repeat
    # the call in that case.
    ends.writing.patience_ms = 1000
    ends.far.send(b"credit")
    assert any(_sends_all_windows(ends, count) for _ in range(20))


def _sends_all_windows(ends: Ends, count: int) -> bool:
    size, is_over = 256 << 10, threading.Event()

    def drain() -> None:
        while not is_over.is_set():
            with suppress(BlockingIOError):
                ends.far.recv(1 << 20)

    reader = threading.Thread(target=drain)
    reader.start()
    batch = WindowBatch(ends.writing)
    windows = [pieces(np.zeros(size, np.uint8), []) for _ in range(count)]
    batch.begin(windows[0])
    batch.set_check(0, None)
    for window in windows[1:]:
        batch.add(window, bytes(FRAME_BYTES), None)
    _, _, moved = batch.move(None)
    is_over.set()
    reader.join()
    return moved == count * (size + TRAILER_BYTES) + (count - 1) * FRAME_BYTES


@needs_pump
@pytest.mark.parametrize("part", [0, 1, FRAME_BYTES - 1])
def test_the_bell_ends_a_wait_for_the_first_window_of_a_batch(ends: Ends, part: int) -> None:
    header = bytes(range(FRAME_BYTES))
    batch, stage = WindowBatch(ends.reading), np.zeros(1 << 10, np.uint8)
    batch.begin(None)
    batch.add(pieces(np.zeros(1000, np.uint8), []), header, None)
    ends.near.send(header[:part])
    os.eventfd_write(ends.bell, 1)
    expected = (-1, part or None, part)
    assert batch.move(None, address_of(stage)) == expected
    assert ends.reading.was_stopped
    assert bytes(stage[:part]) == header[:part]


@needs_pump
@pytest.mark.parametrize("differs_at", [0, 7, FRAME_BYTES - 1])
def test_a_batch_ends_at_once_if_its_first_header_differs(ends: Ends, differs_at: int) -> None:
    header = bytearray(range(FRAME_BYTES))
    batch, stage = WindowBatch(ends.reading), np.zeros(1 << 10, np.uint8)
    memory = np.zeros(1000, np.uint8)
    batch.begin(None)
    batch.add(pieces(memory, []), bytes(header), None)
    header[differs_at] ^= 1
    ends.reading.patience_ms = 60_000
    ends.near.send(bytes(header[: differs_at + 1]) + bytes([9] * 2000))
    index, moved, _ = batch.move(None, address_of(stage))
    assert index == -1
    assert moved == FRAME_BYTES
    assert not memory.any()


@needs_pump
def test_another_thread_computes_while_the_pump_waits(ends: Ends) -> None:
    ends.reading.patience_ms = 60_000
    waiting = threading.Thread(
        target=pieces(np.zeros(10, np.uint8), []).move,
        args=(ends.reading, NOTHING, NOTHING, 0, None),
    )
    waiting.start()
    ends.near.send(b"0123456789")  # reached only if the wait releases the interpreter lock
    waiting.join()


@needs_pump
def test_a_thread_on_a_contended_core_sleeps_instead_of_yielding_to_it_again_and_again(
    ends: Ends,
) -> None:
    # A yield to a process that computes is an involuntary switch, and costs a turn of that process.
    cores = os.sched_getaffinity(0)
    # Bind this thread, and the process started next, to one core.
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = _switches()
        for _ in range(300):
            events, _ = ends.reading.pump.wait(ends.far.fileno(), 1, ends.bell, 50, 0)
            assert not events
        assert _switches() - before < 150
    finally:
        os.sched_setaffinity(0, cores)
        busy.kill()
        busy.wait()


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


@needs_pump
def test_events_and_a_wait_for_what_is_there_keep_the_interpreter_lock(ends: Ends) -> None:
    assert PUMP is not None
    fd, wait = os.eventfd(0, os.EFD_NONBLOCK), PUMP.wait
    ends.far.send(b"here")
    try:
        assert keeps_interpreter_lock(lambda: (ring_eventfd(fd, PUMP), clear_eventfd(fd, PUMP)))
        near, bell = ends.near.fileno(), ends.bell
        assert keeps_interpreter_lock(lambda: wait(near, select.POLLIN, bell, 50, -1))
        assert wait(near, select.POLLIN, bell, 0, -1) == (select.POLLIN, False)
    finally:
        os.close(fd)


@pytest.mark.parametrize("pump", [None, PUMP])
def test_an_eventfd_that_is_not_readable_may_be_cleared(pump: PumpFunctions | None) -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        ring_eventfd(fd, pump)
        for _ in range(2):
            clear_eventfd(fd, pump)
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
    finally:
        os.close(fd)
