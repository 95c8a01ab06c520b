"""Tests that C code which moves several units of KV (windows) per call changes no result.

The same transfers with one window per call are compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import GenerationCheck
from kvtransfer.protocol.frame import (
    TRAILER_BYTES,
    FrameError,
    FrameKind,
    PayloadProof,
    encode_frame,
    encode_window_frame,
)
from kvtransfer.transport_interface import TransportError, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.pump import PUMP, PumpFunctions
from kvtransfer.transports.stream import inbound, outbound
from kvtransfer.transports.stream.window_batch import FRAME_BYTES
from tests.unit.kvtransfer.transports import pipes
from tests.unit.kvtransfer.transports.pipes import BLOCK_BYTES, BLOCKS, Pipe, pipe

pytestmark = pytest.mark.skipif(PUMP is None, reason="the pump is not compiled")
WINDOWS = BLOCKS // 2


@pytest.fixture(scope="module", autouse=True)
def pump() -> Iterator[None]:
    pipes.current_pump = PUMP
    with pytest.MonkeyPatch.context() as patch:
        for module in (inbound, outbound):
            patch.setattr(module, "LEAST_BYTES", 1)
        patch.setattr(outbound, "_STAGED_BYTES", 0)
        yield
    pipes.current_pump = None


@contextlib.contextmanager
def piped(*, checked: bool = True, sends: bool = True, expects: bool = True) -> Iterator[Pipe]:
    # sends    whether the source sends windows in batches
    # expects  whether the sink expects batches
    with pipe(checked=checked) as channel, pytest.MonkeyPatch.context() as patch:
        for calls in (channel.out.calls, channel.inn.calls):
            assert calls is not None
            calls.patience_ms = 0
        if not sends:
            patch.setattr(outbound.Outbound, "_can_lead", lambda *_: False)
        if not expects:
            patch.setattr(channel.ear, "following_windows", lambda *_: [])
        yield channel


def put(channel: Pipe, seed: int = 1) -> list[ByteRuns]:
    # Queue windows of two blocks each, with a message in between.
    rng = np.random.default_rng(seed)
    moves, src, dst = [], rng.permutation(BLOCKS), rng.permutation(BLOCKS)
    for index in range(WINDOWS):
        blocks = src[2 * index : 2 * index + 2]
        lengths = rng.integers(1, BLOCK_BYTES + 1, 2)
        runs = ByteRuns(blocks * BLOCK_BYTES, dst[2 * index : 2 * index + 2] * BLOCK_BYTES, lengths)
        promised = channel.source.generations_of(blocks)
        channel.put(runs, first=index, current=GenerationCheck(channel.source, blocks, promised))
        if index == WINDOWS // 2:
            channel.out.enqueue(encode_frame(FrameKind.MESSAGE, b"in between"))
        moves.append(runs)
    return moves


def wire(channel: Pipe) -> bytes:
    data = bytearray()
    while not channel.out.is_idle:
        channel.out.send_available()
        with contextlib.suppress(BlockingIOError):
            while part := channel.far.recv(1 << 20):
                data += part
    return bytes(data)


def verdicts(channel: Pipe) -> list[object]:
    return [what for kind, what in channel.ear.heard if isinstance(kind, WindowHead)]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_has_the_same_bytes_on_the_wire(checked: bool, seed: int) -> None:
    sent = []
    for sends in (True, False):
        with piped(checked=checked, sends=sends) as channel:
            put(channel, seed)
            sent.append((wire(channel), channel.sent))
    assert sent[0] == sent[1]


@pytest.mark.parametrize("checked", [True, False])
def test_windows_land_in_few_calls_of_the_pump(checked: bool) -> None:
    calls = []
    with piped(checked=checked) as channel:
        moves = put(channel)
        assert channel.inn.calls is not None
        pump = channel.inn.calls.pump

        def receive(*arguments: object) -> tuple[int, int, int, bool]:
            calls.append(arguments)
            return pump.receive_windows(*arguments)

        channel.inn.calls.pump = pump._replace(receive_windows=receive)
        data = wire(channel)
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with contextlib.suppress(EOFError):
            _feed(channel, data, len(data))
        assert len(calls) <= WINDOWS // 2
        assert verdicts(channel) == [WindowVerdict.OK] * WINDOWS
        assert (channel.sink.bytes == channel.expected(*moves)).all()


@given(seed=st.integers(0, 1 << 30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_receiver_with_a_forecast_reports_what_one_without_does(
    seed: int, data: st.DataObject
) -> None:
    with piped() as channel:
        put(channel, seed)
        sent = bytearray(wire(channel))
    for _ in range(data.draw(st.integers(0, 2))):
        sent[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    step = data.draw(st.sampled_from([997, 8192, 30_000, 1 << 20]))
    lost = data.draw(st.sets(st.integers(0, WINDOWS - 1), max_size=2))
    seen = [_received(bytes(sent), step, seed, lost, expects=expects) for expects in (True, False)]
    assert seen[0][:2] == seen[1][:2]
    assert (seen[0][2] == seen[1][2]).all()


@given(seed=st.integers(0, 1 << 30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_receiver_that_waits_for_windows_reports_what_one_without_a_forecast_does(
    seed: int, data: st.DataObject
) -> None:
    # The bytes arrive in the pump's calls, cut near the ends of windows.
    with piped() as channel:
        put(channel, seed)
        sent = bytearray(wire(channel))
        ends = list(_ends(channel, bytes(sent)))
    cuts = {0, len(sent)}
    for end in ends:
        shift = data.draw(st.sampled_from([None, 0, 0, 0, 1, 17, FRAME_BYTES, FRAME_BYTES + 9, -5]))
        if shift is not None:
            cuts.add(min(len(sent), end + shift))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.sampled_from(ends)) + data.draw(st.integers(-30, FRAME_BYTES))
        sent[min(at, len(sent) - 1)] ^= 1 << data.draw(st.integers(0, 7))
    lost = data.draw(st.sets(st.integers(0, WINDOWS - 1), max_size=1))
    parts = [bytes(sent[begin:end]) for begin, end in pairwise(sorted(cuts))]
    seen = [_received(parts, 1 << 20, seed, lost, expects=expects) for expects in (True, False)]
    assert seen[0][:2] == seen[1][:2]
    assert (seen[0][2] == seen[1][2]).all()


def _ends(channel: Pipe, sent: bytes) -> Iterator[int]:
    # Yield the ends of the windows' trailers in the bytes that were sent.
    for head in channel.ear.places:
        proof = PayloadProof.XXH3
        at = sent.index(encode_window_frame(head, head.n_bytes, proof))
        yield at + FRAME_BYTES + head.n_bytes + TRAILER_BYTES


def _received(
    sent: bytes | list[bytes], step: int, seed: int, lost: set[int], *, expects: bool
) -> tuple[list[object], str, np.ndarray]:
    # Return what a sink that does not want the windows `lost` reports, its error and its memory.
    with piped(expects=expects) as channel:
        put(channel, seed)
        for head in list(channel.ear.places):
            if head.first in lost:
                del channel.ear.places[head]
        error = ""
        try:
            if isinstance(sent, bytes):
                _feed(channel, sent, step)
            else:
                _feed_while_waiting(channel, sent, [])
        except (EOFError, FrameError, TransportError) as failure:
            error = str(failure)
        return channel.ear.heard, error, channel.sink.bytes.copy()


def _feed(channel: Pipe, sent: bytes, step: int) -> None:
    for begin in range(0, len(sent), step):
        view = memoryview(sent)[begin : begin + step]
        while view:
            with contextlib.suppress(BlockingIOError):
                view = view[channel.near.send(view) :]
            channel.receive()
    channel.near.close()
    channel.receive()


def _feed_while_waiting(channel: Pipe, parts: list[bytes], used: list[str]) -> None:
    # Send a part whenever the pump begins to wait for a window, or nothing is left to receive. Add
    # the names of the pump's functions that are called to `used`.
    calls, left = channel.inn.calls, parts[::-1]
    assert calls is not None
    channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    pump = calls.pump

    def send_part() -> None:
        part = left.pop()
        with contextlib.suppress(BlockingIOError):
            part = part[channel.near.send(part) :]
        if part:
            left.append(part)

    def receive_windows(*arguments: int) -> tuple[int, int, int, bool]:
        used.append("receive_windows")
        has_begun = not ctypes.c_uint64.from_address(arguments[2] + 4 * 8).value  # frame_size
        if left and not has_begun:
            send_part()
        return pump.receive_windows(*arguments)

    def receive(*arguments: int) -> int:
        used.append("receive")
        return pump.receive(*arguments)

    calls.pump = pump._replace(receive_windows=receive_windows, receive=receive)
    while left:
        send_part()
        channel.receive()
    channel.near.close()
    channel.receive()


def test_the_pump_waits_for_the_windows_behind_a_batch() -> None:
    # A thread that sleeps elsewhere needs the interpreter lock twice before it reads on.
    with piped() as channel:
        moves = put(channel)
        data = wire(channel)
        third, seventh = (list(_ends(channel, data))[index] for index in (2, 6))
        parts = [data[:third], data[third:seventh], data[seventh:]]
        used: list[str] = []
        with contextlib.suppress(EOFError):
            _feed_while_waiting(channel, parts, used)
        assert verdicts(channel) == [WindowVerdict.OK] * WINDOWS
        assert (channel.sink.bytes == channel.expected(*moves)).all()
        assert channel.ear.batches[:2] == [3, 4]
        assert used[:4] == ["receive", "receive_windows", "receive_windows", "receive_windows"]


def test_the_pump_goes_on_waiting_for_windows_behind_a_message() -> None:
    # Heartbeats come all the time.
    message = encode_frame(FrameKind.MESSAGE, b"in between")
    with piped() as channel:
        put(channel)
        data = wire(channel)
        begin = data.index(message)
        parts = [data[:begin], message, data[begin + len(message) :]]
        used: list[str] = []
        with contextlib.suppress(EOFError):
            _feed_while_waiting(channel, parts, used)
        assert verdicts(channel) == [WindowVerdict.OK] * WINDOWS
        assert channel.ear.heard[WINDOWS // 2 + 1] == (FrameKind.MESSAGE, b"in between")
        assert used[:4] == ["receive", "receive_windows", "receive_windows", "receive_windows"]


def test_a_window_behind_a_batch_is_not_awaited_after_the_fence() -> None:
    with piped() as channel:
        put(channel)
        data = wire(channel)
        end = list(_ends(channel, data))[2]
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        channel.near.sendall(data[:end])
        while len(verdicts(channel)) < 3:
            channel.inn.receive_available()
        channel.inn.discard_transfer(1)
        memory = channel.sink.bytes.copy()
        channel.ear.place_window = lambda head: None  # type: ignore[method-assign]
        channel.near.sendall(data[end:])
        channel.receive()
        assert (channel.sink.bytes == memory).all()
        assert verdicts(channel) == [WindowVerdict.OK] * 3


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_window_is_reported_although_the_next_one_does_not_come_whole(has_begun: bool) -> None:
    # The layers of the second window may be computed later; its source may wait for credit, or halt
    # in the middle of it. In this test, the pump would wait for the rest of a batch for minutes.
    with piped() as channel:
        put(channel)
        head, *_ = channel.ear.places
        length = FRAME_BYTES + head.n_bytes + TRAILER_BYTES
        sent = wire(channel)[: length + (head.n_bytes // 2 if has_begun else 0)]
        assert channel.inn.calls is not None
        channel.inn.calls.patience_ms = 15_000
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        channel.near.setblocking(True)
        channel.near.sendall(sent)
        began_s = time.monotonic()
        while not verdicts(channel):
            channel.inn.receive_available()
        assert time.monotonic() - began_s < 60.0
        assert verdicts(channel) == [WindowVerdict.OK]


@pytest.mark.parametrize("unwanted_at", [(3, 4), (WINDOWS // 2,), (WINDOWS - 1,)])
@pytest.mark.parametrize("step", [20_000, 1 << 20])
def test_a_window_that_is_no_longer_wanted_when_it_is_placed_is_not_reported(
    unwanted_at: tuple[int, ...], step: int
) -> None:
    with piped() as channel:
        put(channel)
        data = wire(channel)
        heads = list(channel.ear.places)
        place, unwanted = channel.ear.place_window, {heads[index] for index in unwanted_at}
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        channel.ear.place_window = (  # type: ignore[method-assign]
            lambda head: None if head in unwanted else place(head)
        )
        with contextlib.suppress(EOFError):
            _feed(channel, data, step)
        landed = [kind for kind, _ in channel.ear.heard if isinstance(kind, WindowHead)]
        assert landed == [head for head in heads if head not in unwanted]


@given(index=st.integers(0, WINDOWS - 1), steps=st.integers(0, 12), ends=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_window_whose_blocks_change_their_owner_is_stale_and_no_other(
    index: int, steps: int, ends: bool
) -> None:
    with piped() as channel:
        moves, live = put(channel), np.ones(1, np.uint32)
        for item in channel.out._queue:
            if isinstance(item, tuple) and item[0].first == index:
                current = item[1].is_current
                assert isinstance(current, GenerationCheck)
                current.lease_flag = live
        for _ in range(steps):
            channel.out.send_available()
            channel.receive()
        landed = len(verdicts(channel))
        if ends:
            live[0] = 0
        else:
            channel.source.bump(moves[index].src // BLOCK_BYTES)
        channel.flow()
        expected = [WindowVerdict.OK] * WINDOWS
        got = verdicts(channel)
        if got != expected:
            assert index >= landed
            expected[index] = WindowVerdict.STALE
        elif index > landed + 1:
            pytest.fail("a window was sent from blocks of another owner")
        assert got == expected


@given(steps=st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_dropped_windows_of_a_batch_are_not_sent(steps: int) -> None:
    with piped() as channel:
        moves = put(channel)
        for _ in range(steps):
            channel.out.send_available()
            channel.receive()
        channel.out.drop(1)
        channel.source.bytes[:] = 0xEE  # the memory has a new owner
        channel.flow()
        got = verdicts(channel)
        assert got.count(WindowVerdict.STALE) <= 1
        assert len(got) <= WINDOWS
        intact = got.count(WindowVerdict.OK)
        with pipe() as before:
            expected = before.expected(*moves[:intact])
        for runs in moves[:intact]:
            for dst, length in zip(runs.dst, runs.length, strict=True):
                assert (
                    channel.sink.bytes[dst : dst + length] == expected[dst : dst + length]
                ).all()
        assert channel.out.is_idle


def test_windows_that_the_pump_did_not_begin_stay_in_the_queue_in_their_order() -> None:
    with piped() as channel:
        put(channel)
        channel.out.send_available()
        queued = [item[0].first for item in channel.out._queue if isinstance(item, tuple)]
        assert queued
        assert queued == list(range(queued[0], WINDOWS))


def test_a_window_outside_the_region_ends_the_link_as_without_a_batch() -> None:
    with piped() as channel:
        moves = put(channel)
        data = wire(channel)
        head = list(channel.ear.places)[2]
        bad = ByteRuns(moves[2].src, moves[2].dst + channel.sink.bytes.size, moves[2].length)
        channel.ear.places[head] = WindowSlice(bad, channel.sink, 0, 0)
        with pytest.raises(TransportError):
            _feed(channel, data, 1 << 20)


def test_the_last_window_of_a_batch_leaves_with_its_trailer() -> None:
    # Its trailer would otherwise wait until Python has the interpreter lock, and the peer with it.
    with piped() as channel:
        calls = channel.out.calls
        assert calls is not None
        blocks = np.arange(2)
        runs = ByteRuns(blocks * BLOCK_BYTES, blocks * BLOCK_BYTES, np.full(2, 1000))
        promised = channel.source.generations_of(blocks)
        channel.put(runs, current=GenerationCheck(channel.source, blocks, promised))
        used: list[str] = []
        calls.pump = _noting(calls.pump, used)
        data = wire(channel)
        # `send` takes the header, `send_windows` all that follows.
        assert used == ["send", "send_windows"]
        assert len(data) == FRAME_BYTES + 2000 + TRAILER_BYTES


def _noting(pump: PumpFunctions, used: list[str]) -> PumpFunctions:
    def noted(name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            used.append(name)
            return getattr(pump, name)(*arguments)

        return call

    return pump._replace(**{name: noted(name) for name in ("move", "send", "send_windows")})


@pytest.mark.parametrize("left", range(TRAILER_BYTES + 1))
@pytest.mark.parametrize("windows", [1, 3])
def test_the_rest_of_a_last_trailer_follows_when_there_is_room(left: int, windows: int) -> None:
    # The pump sends into a socket with room, from which all but `left` bytes reach the link's.
    with piped() as channel, contextlib.ExitStack() as stack:
        near, far = (stack.enter_context(end) for end in socket.socketpair())
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        calls = channel.out.calls
        assert calls is not None
        send_windows = calls.pump.send_windows

        def send(_: int, *arguments: int) -> tuple[int, int, int, bool]:
            index, moved, total, is_stopped = send_windows(near.fileno(), *arguments)
            data = _drain(far, total)
            channel.near.setblocking(True)
            channel.near.sendall(data[: len(data) - left])
            channel.near.setblocking(False)
            return index, moved - left, total - left, is_stopped

        calls.pump = calls.pump._replace(send_windows=send)
        moves = []
        for index in range(windows):
            blocks = np.arange(2 * index, 2 * index + 2)
            runs = ByteRuns(blocks * BLOCK_BYTES, blocks * BLOCK_BYTES, np.full(2, 1000))
            promised = channel.source.generations_of(blocks)
            check = GenerationCheck(channel.source, blocks, promised)
            channel.put(runs, first=index, current=check)
            moves.append(runs)
        channel.flow()
        assert verdicts(channel) == [WindowVerdict.OK] * windows
        assert (channel.sink.bytes == channel.expected(*moves)).all()
        assert [head.first for head in channel.sent] == list(range(windows))


def _drain(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += sock.recv(size - len(data))
    return bytes(data)


def test_the_windows_of_a_batch_are_reported_together() -> None:
    with piped() as channel:
        put(channel)
        data = wire(channel)
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with contextlib.suppress(EOFError):
            _feed(channel, data, len(data))
        # A message follows the window in the middle.
        assert channel.ear.batches == [WINDOWS // 2 + 1, WINDOWS // 2 - 1]


def test_intact_windows_are_reported_before_one_that_is_corrupt() -> None:
    with piped() as channel:
        put(channel)
        data = bytearray(wire(channel))
        heads = list(channel.ear.places)
        length = sum(FRAME_BYTES + head.n_bytes + TRAILER_BYTES for head in heads[:4])
        data[length - TRAILER_BYTES - 1] ^= 1
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with contextlib.suppress(EOFError):
            _feed(channel, bytes(data[:length]), length)
        assert verdicts(channel) == [WindowVerdict.OK] * 3 + [WindowVerdict.CORRUPT]
        assert channel.ear.batches == [3]


@pytest.mark.parametrize("expects", [True, False])
@pytest.mark.parametrize("broken", [1, 3, WINDOWS - 1])
def test_intact_windows_are_reported_before_a_trailer_that_ends_the_link(
    broken: int, expects: bool
) -> None:
    with piped(expects=expects) as channel:
        put(channel)
        data = bytearray(wire(channel))
        heads = list(channel.ear.places)
        # A message follows the window in the middle.
        at = data.index(_header(heads[broken])) + FRAME_BYTES + heads[broken].n_bytes
        data[at] = 0x80  # no verdict
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with pytest.raises(FrameError):
            _feed(channel, bytes(data), len(data))
        assert verdicts(channel) == [WindowVerdict.OK] * broken


def _header(head: WindowHead) -> bytes:
    return encode_window_frame(head, head.n_bytes, PayloadProof.XXH3)


def test_intact_windows_are_reported_before_a_failure_to_place_the_next() -> None:
    with piped() as channel:
        put(channel)
        data = wire(channel)
        heads = list(channel.ear.places)
        place = channel.ear.place_window

        def fail(head: WindowHead) -> WindowSlice | None:
            if head == heads[3]:
                raise TransportError("the test's owner of the blocks refuses the fourth window")
            return place(head)

        channel.ear.place_window = fail  # type: ignore[method-assign]
        channel.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with pytest.raises(TransportError):
            _feed(channel, data, len(data))
        assert verdicts(channel) == [WindowVerdict.OK] * 3


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("windows", [1, 2])
def test_a_last_window_whose_blocks_change_their_owner_while_it_is_sent_is_stale(
    windows: int, ends: bool
) -> None:
    with piped() as channel:
        live = np.ones(1, np.uint32)
        for index in range(windows):
            blocks = np.arange(BLOCKS // 2) + index * (BLOCKS // 2)
            offsets = blocks * BLOCK_BYTES
            runs = ByteRuns(offsets, offsets, np.full(blocks.size, BLOCK_BYTES))
            promised = channel.source.generations_of(blocks)
            is_last = index == windows - 1
            check = GenerationCheck(channel.source, blocks, promised, live if is_last else None)
            channel.put(runs, first=index, current=check)
        while channel.out._body is None or len(verdicts(channel)) < windows - 1:
            channel.out.send_available()
            channel.receive()
        channel.out.send_available()
        body = channel.out._body
        assert body is not None
        assert body.head is not None
        assert body.head.first == windows - 1
        assert 0 < body.pieces.done < body.pieces.size
        if ends:
            live[0] = 0
        else:
            channel.source.bump(blocks)
        channel.flow()
        assert verdicts(channel) == [WindowVerdict.OK] * (windows - 1) + [WindowVerdict.STALE]
