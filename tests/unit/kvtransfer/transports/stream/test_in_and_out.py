"""Tests that KV sent over a socket arrives in its place, and that errors are detected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.protocol.frame import (
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    FrameError,
    FrameKind,
    FrameLimits,
    PayloadProof,
    encode_frame,
    encode_trailer,
    pack_head,
)
from kvtransfer.transport_interface import TransportError, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.pump import PUMP
from kvtransfer.transports.stream.kv_encryption import WindowSeal, WindowSealError
from tests.unit.kvtransfer.transports import pipes
from tests.unit.kvtransfer.transports.pipes import BLOCK_BYTES, KEY, SIZE, Pipe, pipe, scattered


@pytest.fixture(scope="module", params=["python", "native"], autouse=True)
def pump(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "native":
        if PUMP is None:
            pytest.skip("the pump is not compiled")
        pipes.current_pump = PUMP
    yield
    pipes.current_pump = None


PROOFS = ["none", "xxh3", "gcm"]
WHOLE = ByteRuns(np.array([0]), np.array([0]), np.array([SIZE]))


def seal(channel: Pipe) -> None:
    pytest.importorskip("cryptography")
    channel.out.seal, channel.inn.seal = WindowSeal(KEY), WindowSeal(KEY)


@contextlib.contextmanager
def piped(proof: str):
    with pipe(checked=proof == "xxh3") as channel:
        if proof == "gcm":
            seal(channel)
        yield channel


def wire(channel: Pipe) -> bytearray:
    data = bytearray()
    while not channel.out.is_idle:
        channel.out.send_available()
        with contextlib.suppress(BlockingIOError):
            while part := channel.far.recv(1 << 20):
                data += part
    return data


def feed(channel: Pipe, data: bytes | bytearray) -> None:
    # Make the sink read these bytes and then the end of the stream.
    #
    # Raises what the sink raises.
    view = memoryview(data)
    while view:
        with contextlib.suppress(BlockingIOError):
            view = view[channel.near.send(view) :]
        channel.receive()
    channel.near.close()
    with contextlib.suppress(EOFError):
        channel.receive()


@pytest.mark.parametrize("proof", PROOFS)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 40),
    longest=st.sampled_from([1, 100, 4096, 12_000]),
)
@settings(max_examples=15, deadline=None)
def test_runs_land_in_their_places_and_messages_keep_their_order(
    proof: str, seed: int, count: int, longest: int
) -> None:
    with piped(proof) as channel:
        runs = scattered(seed, count, longest)
        parts = [runs.cut(first, min(7, runs.count - first)) for first in range(0, runs.count, 7)]
        heads = []
        for index, part in enumerate(parts):
            channel.out.enqueue(
                encode_frame(FrameKind.MESSAGE, bytes([index]) * (1 + index * 9000))
            )
            heads.append(channel.put(part, first=index))
        channel.flow()
        said = [header for kind, header in channel.ear.heard if kind is FrameKind.MESSAGE]
        assert said == [bytes([index]) * (1 + index * 9000) for index in range(len(parts))]
        assert [item for item in channel.ear.heard if isinstance(item[0], WindowHead)] == [
            (h, WindowVerdict.OK) for h in heads
        ]
        assert channel.sent == heads
        assert np.array_equal(channel.sink.bytes, channel.expected(runs))


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize(("count", "longest"), [(1, 16 << 10), (64, 1000), (65, 1000), (300, 50)])
def test_small_windows_arrive_whole_whether_they_are_copied_first_or_not(
    proof: str, count: int, longest: int
) -> None:
    with piped(proof) as channel:
        runs = scattered(7, count, longest)
        heads = [channel.put(runs, first=index) for index in range(5)]
        channel.flow()
        assert channel.ear.heard == [(head, WindowVerdict.OK) for head in heads]
        assert channel.sent == heads
        assert np.array_equal(channel.sink.bytes, channel.expected(runs))


@pytest.mark.parametrize("proof", PROOFS)
def test_a_message_of_megabytes_between_windows_arrives_whole(proof: str) -> None:
    with piped(proof) as channel:
        large = np.random.default_rng(2).bytes(3 << 20)
        first = channel.put(scattered(1, 30, 8000), first=1)
        channel.out.enqueue(encode_frame(FrameKind.MESSAGE, large))
        second = channel.put(scattered(1, 30, 8000), first=2)
        channel.flow()
        assert channel.ear.heard == [
            (first, WindowVerdict.OK),
            (FrameKind.MESSAGE, large),
            (second, WindowVerdict.OK),
        ]


def test_a_reader_knows_when_the_socket_has_nothing_more() -> None:
    # Without the pump it does not: TLS may hold bytes that poll does not show.
    is_native = pipes.current_pump is not None
    with pipe() as channel:
        channel.out.enqueue(encode_frame(FrameKind.MESSAGE, b"short"))
        channel.out.send_available()
        assert channel.inn.receive_available()
        assert channel.inn.is_drained == is_native
        for _ in range(2):
            channel.out.enqueue(encode_frame(FrameKind.MESSAGE, bytes(5000)))
        channel.out.send_available()
        assert channel.inn.receive_available()
        assert not channel.inn.is_drained
        channel.receive()
        channel.put(ByteRuns(np.array([0]), np.array([0]), np.array([9000])))
        data = bytearray()
        while not channel.out.is_idle:
            channel.out.send_available()
        with contextlib.suppress(BlockingIOError):
            while part := channel.far.recv(1 << 20):
                data += part
        for begin, end in ((0, 8500), (8500, len(data))):
            channel.near.send(data[begin:end])
            channel.inn.receive_available()
            assert channel.inn.is_drained == (is_native and end == len(data))


def test_an_altered_byte_of_a_window_is_corrupt() -> None:
    with pipe() as channel:
        head = channel.put(scattered(3, 5, 3000))
        data = wire(channel)
        data[len(data) // 2] ^= 4
        feed(channel, data)
        assert channel.ear.heard == [(head, WindowVerdict.CORRUPT)]


@pytest.mark.parametrize("where", ["header", "bytes", "tag"])
def test_a_sealed_window_that_was_touched_breaks_the_link_before_anything_is_written(
    where: str,
) -> None:
    with pipe() as channel:
        seal(channel)
        channel.put(scattered(3, 5, 3000))
        data = wire(channel)
        if where == "header":  # the checksum is valid, so only the seal detects the forgery
            forged = WindowHead(1, 0, 0, 1, 5, channel.ear.places.popitem()[0].n_bytes)
            channel.ear.places[forged] = WindowSlice(scattered(4, 5, 3000), channel.sink, 0, 0)
            size = forged.n_bytes
            channel.ear.places[forged] = WindowSlice(
                ByteRuns(np.array([0]), np.array([0]), np.array([size])), channel.sink, 0, 0
            )
            opening = encode_frame(FrameKind.WINDOW, pack_head(forged), size, PayloadProof.GCM)
            data[: len(opening)] = opening
        else:
            data[len(data) // 2 if where == "bytes" else -1] ^= 1
        with pytest.raises(WindowSealError):
            feed(channel, data)
        assert not channel.sink.bytes.any()
        assert not channel.ear.heard


@pytest.mark.parametrize(
    "order", [(0, 0), (1,), (1, 0)], ids=["repeated", "one left out", "swapped"]
)
def test_sealed_windows_arrive_once_each_and_in_order(order: tuple[int, ...]) -> None:
    with pipe() as channel:
        seal(channel)
        recorded = []
        for index in range(2):
            channel.put(scattered(index, 5, 3000), first=index)
            recorded.append(wire(channel))
        with pytest.raises(WindowSealError):
            feed(channel, b"".join(recorded[index] for index in order))


def test_a_plain_window_on_a_sealed_link_is_refused_and_vice_versa() -> None:
    pytest.importorskip("cryptography")
    for sender in (True, False):
        with pipe() as channel:
            if sender:
                channel.out.seal = WindowSeal(KEY)
            else:
                channel.inn.seal = WindowSeal(KEY)
            channel.put(scattered(1, 3, 100))
            with pytest.raises(FrameError, match="both ends need the same option"):
                channel.flow()


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("answers", [[False], [True, False]], ids=["before", "while it was read"])
@pytest.mark.parametrize("longest", [50, 12_000])
def test_blocks_that_changed_owner_make_a_window_stale(
    proof: str, answers: list[bool], longest: int
) -> None:
    with piped(proof) as channel:
        said = iter([*answers, *[answers[-1]] * 9])
        head = channel.put(scattered(1, 20, longest), current=lambda: next(said))
        after = channel.put(scattered(2, 3, 50), first=9)
        channel.flow()
        assert channel.ear.heard == [(head, WindowVerdict.STALE), (after, WindowVerdict.OK)]
        if not answers[0]:
            assert np.array_equal(channel.sink.bytes, channel.expected(scattered(2, 3, 50))), (
                "nothing was read"
            )


@pytest.mark.parametrize("longest", [50, 12_000])
def test_one_broken_bit_does_not_make_a_stale_window_a_good_one(longest: int) -> None:
    with pipe() as channel:
        said = iter([True, *[False] * 9])
        head = channel.put(scattered(1, 20, longest), current=lambda: next(said))
        data = wire(channel)
        assert data[-TRAILER_BYTES] == 1
        data[-TRAILER_BYTES] ^= 1
        feed(channel, data)
        assert channel.ear.heard == [(head, WindowVerdict.CORRUPT)]


def test_of_a_window_dropped_midway_only_zeros_follow_and_the_stream_goes_on() -> None:
    with pipe() as channel:
        head = channel.put(WHOLE)
        other = channel.put(scattered(2, 3, 50), transfer=1, first=5)
        channel.out.send_available()
        channel.receive()
        arrived = int(np.count_nonzero(channel.sink.bytes))
        assert 0 < arrived < SIZE
        channel.out.drop(1)
        channel.put(scattered(2, 3, 50), transfer=2)
        channel.flow()
        assert channel.ear.heard[0] == (head, WindowVerdict.STALE)
        assert len(channel.ear.heard) == 2
        assert other not in channel.sent
        assert np.count_nonzero(channel.sink.bytes[arrived + 200_000 :]) < 200, (
            "what followed was not the memory"
        )


@pytest.mark.parametrize("proof", PROOFS)
def test_after_a_fence_in_the_middle_of_a_window_nothing_more_is_written(proof: str) -> None:
    with piped(proof) as channel:
        channel.put(WHOLE)
        channel.out.send_available()
        channel.receive()
        channel.inn.discard_transfer(1)
        channel.sink.bytes[:] = 0
        after = channel.put(scattered(2, 3, 50), transfer=2)
        channel.flow()
        assert channel.ear.heard == [(after, WindowVerdict.OK)]
        assert np.array_equal(channel.sink.bytes, channel.expected(scattered(2, 3, 50)))


def test_a_fence_of_another_transfer_leaves_a_window_alone() -> None:
    with pipe() as channel:
        head = channel.put(WHOLE)
        channel.out.send_available()
        channel.receive()
        channel.inn.discard_transfer(2)
        channel.flow()
        assert channel.ear.heard == [(head, WindowVerdict.OK)]


@pytest.mark.parametrize("size", [1, 5000])
def test_a_window_of_another_size_than_planned_is_refused_before_it_is_read(size: int) -> None:
    with pipe() as channel:
        head = WindowHead(1, 0, 0, 0, 1, size)
        channel.ear.places[head] = WindowSlice(
            ByteRuns(np.array([0]), np.array([0]), np.array([size + 1])), channel.sink, 0, 0
        )
        with pytest.raises(FrameError, match="bytes are planned"):
            feed(
                channel,
                encode_frame(FrameKind.WINDOW, pack_head(head), size)
                + b"x" * size
                + encode_trailer(WindowVerdict.OK),
            )
        assert not channel.sink.bytes.any()


def test_a_window_whose_header_and_payload_disagree_is_refused() -> None:
    with pipe() as channel, pytest.raises(FrameError, match="bytes of payload"):
        feed(
            channel,
            encode_frame(FrameKind.WINDOW, pack_head(WindowHead(1, 0, 0, 0, 1, 5)), 4)
            + b"xxxx"
            + encode_trailer(WindowVerdict.OK),
        )


@pytest.mark.parametrize(("dst", "length"), [(SIZE - 5, 6), (-1, 3), (0, 0), (SIZE, 1)])
def test_runs_beyond_the_region_are_never_followed(dst: int, length: int) -> None:
    with pipe() as channel:
        runs = ByteRuns(np.array([dst]), np.array([dst]), np.array([length]))
        head = channel.put(runs)
        with pytest.raises(TransportError):
            channel.out.send_available()
        if length:
            with pytest.raises(TransportError):
                feed(
                    channel,
                    encode_frame(FrameKind.WINDOW, pack_head(head), length)
                    + b"x" * length
                    + encode_trailer(WindowVerdict.OK),
                )


def test_an_unproven_peer_may_send_little_and_write_nothing() -> None:
    for data in (
        encode_frame(FrameKind.MESSAGE, bytes(30_000)),
        encode_frame(FrameKind.WINDOW, pack_head(WindowHead(1, 0, 0, 0, 1, 5)), 5),
    ):
        with pipe() as channel:
            channel.inn.limits = FrameLimits(header_bytes=24 << 10, payload_bytes=0)
            with pytest.raises(FrameError, match="exceeds the limit"):
                feed(channel, data)


def test_an_unexpected_window_is_discarded() -> None:
    with pipe() as channel:
        channel.put(WHOLE)
        channel.ear.places.clear()
        after = channel.put(scattered(2, 3, 50), first=1)
        channel.flow()
        assert channel.ear.heard == [(after, WindowVerdict.OK)]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_fuzzed_streams_end_in_a_frame_error_or_in_what_was_sent_and_never_write_elsewhere(
    data: st.DataObject,
) -> None:
    with pipe() as channel:
        runs = ByteRuns(
            np.array([0, BLOCK_BYTES]),
            np.array([BLOCK_BYTES, 3 * BLOCK_BYTES]),
            np.array([700, 5000]),
        )
        channel.out.enqueue(encode_frame(FrameKind.MESSAGE, b"hello"))
        head = channel.put(runs)
        channel.out.enqueue(encode_frame(FrameKind.MESSAGE, b"m" * 6000))
        stream = wire(channel)
        for _ in range(data.draw(st.integers(1, 3))):
            if not stream:
                break
            index = data.draw(st.integers(0, len(stream) - 1))
            match data.draw(st.sampled_from(["alter", "cut", "insert", "remove"])):
                case "alter":
                    stream[index] ^= data.draw(st.integers(1, 255))
                case "cut":
                    del stream[index + 1 :]
                case "insert":
                    stream[index:index] = data.draw(st.binary(min_size=1, max_size=40))
                case "remove":
                    del stream[index : index + data.draw(st.integers(1, 40))]
        with contextlib.suppress(FrameError):
            feed(channel, stream)
        untouched = np.ones(SIZE, bool)
        for dst, length in zip(runs.dst, runs.length, strict=True):
            untouched[dst : dst + length] = False
        assert not channel.sink.bytes[untouched].any()
        right = np.array_equal(channel.sink.bytes, channel.expected(runs))
        assert all(
            verdict is not WindowVerdict.OK or (what == head and right)
            for what, verdict in channel.ear.heard
        )
        assert {what for what, _ in channel.ear.heard} <= {head, FrameKind.MESSAGE}
        assert {said for what, said in channel.ear.heard if what is FrameKind.MESSAGE} <= {
            b"hello",
            b"m" * 6000,
        }


@given(st.binary(min_size=1, max_size=3 * PREAMBLE_BYTES))
@settings(max_examples=200, deadline=None)
def test_noise_yields_no_message(noise: bytes) -> None:
    with pipe() as channel:
        with contextlib.suppress(FrameError):
            feed(channel, noise)
        assert not channel.ear.heard
        assert not channel.sink.bytes.any()
