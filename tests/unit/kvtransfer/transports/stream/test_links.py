"""Tests of connections over real sockets: sending by the caller, closing, hostile peers."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.frame import (
    TRAILER_BYTES,
    FrameKind,
    PayloadProof,
    encode_frame,
    pack_head,
)
from kvtransfer.transport_interface import (
    Link,
    TransportError,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.transports.pump import PUMP
from kvtransfer.transports.stream.link import StreamLink
from kvtransfer.transports.stream.link_options import LinkOptions
from kvtransfer.transports.tcp import Tcp
from tests.contract.kvtransfer.links import (
    BLOCK_BYTES,
    BLOCKS,
    PATIENCE_S,
    Owner,
    Pair,
    linked_pair,
    scattered,
    window,
)

SIZE = BLOCKS * BLOCK_BYTES
WHOLE = ByteRuns(np.array([0]), np.array([0]), np.array([SIZE]))


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with linked_pair(request.param) as connected:
        yield connected


def driven(link: Link) -> StreamLink:
    assert isinstance(link, StreamLink)
    return link


@pytest.fixture
def stranger() -> Iterator[tuple[socket.socket, Owner, Region]]:
    owner, region, end = Owner(), MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name="sink"), Tcp()
    end.start(owner, [region])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = end.dial(f"127.0.0.1:{listener.getsockname()[1]}")
        sock, _ = listener.accept()
        owner.note("mine", link)
        with sock:
            yield sock, owner, region
    end.close()


def link_of(owner: Owner) -> Link:
    return owner.heard[0].link


def eventually(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_waiting_thread_may_drive_the_link(pair: Pair) -> None:
    moves = scattered(1, 20, 4096)
    head = window(1, moves)
    pair.expect({head: moves})
    pair.admit(1)
    for index in range(10):
        pair.source.send(index.to_bytes(2, "big"))
        assert driven(pair.source).drive(
            lambda at=index: len(pair.sink_owner.all("message")) > at, 10.0
        )
    pair.put(head, moves)
    assert driven(pair.source).drive(lambda: bool(pair.source_owner.all("sent")), 10.0)
    assert pair.sink_owner.wait("landed") == [(head, WindowVerdict.OK)]


def test_the_switch_interval_is_short_from_the_first_window_until_a_while_after_the_last(
    pair: Pair,
) -> None:
    usual_s, during_s = sys.getswitchinterval(), list[float]()
    moves = scattered(1, 20, 4096)
    head = window(1, moves)
    pair.expect({head: moves})
    pair.admit(1)
    place = pair.sink_owner.place

    def record(at: WindowHead) -> WindowSlice | None:
        during_s.append(sys.getswitchinterval())
        return place(at)

    pair.sink_owner.place = record
    pair.put(head, moves)
    assert pair.sink_owner.wait("landed") == [(head, WindowVerdict.OK)]
    assert [round(seconds, 6) for seconds in during_s] == [LinkOptions().switch_interval_s]
    eventually(lambda: sys.getswitchinterval() == usual_s)


def test_the_switch_interval_is_short_as_soon_as_windows_are_expected(pair: Pair) -> None:
    usual_s = sys.getswitchinterval()
    pair.source.expect_windows()
    assert round(sys.getswitchinterval(), 6) == LinkOptions().switch_interval_s
    pair.sink.send(b"a heartbeat, which wakes the thread of the link")
    eventually(lambda: sys.getswitchinterval() == usual_s)


def test_a_link_that_is_lost_between_windows_leaves_the_usual_switch_interval(pair: Pair) -> None:
    usual_s = sys.getswitchinterval()
    moves = scattered(1, 20, 4096)
    head = window(1, moves)
    pair.expect({head: moves})
    pair.admit(1)
    pair.put(head, moves)
    pair.sink_owner.wait("landed")
    pair.source.close()
    pair.sink_owner.wait("lost")
    driven(pair.source).join()
    driven(pair.sink).join()
    pair.put(head, moves)
    assert sys.getswitchinterval() == usual_s


def test_after_the_last_drive_the_links_own_thread_takes_over(pair: Pair) -> None:
    assert driven(pair.source).drive(lambda: True, 1.0)
    pair.sink.send(b"ping")
    pair.source.send(b"pong")
    assert pair.source_owner.wait("message") == [b"ping"]
    assert pair.sink_owner.wait("message") == [b"pong"]


def test_what_the_last_driver_leaves_is_done_by_the_links_own_thread(pair: Pair) -> None:
    link = driven(pair.source)

    def leave_a_message() -> bool:
        link._out.enqueue(encode_frame(FrameKind.MESSAGE, b"left"))
        return True

    assert link.drive(leave_a_message, 1.0)
    assert pair.sink_owner.wait("message") == [b"left"]


@contextlib.contextmanager
def asleep(link: StreamLink) -> Iterator[None]:
    # Keep the link's own thread asleep, as a thread that needs the interpreter lock to go on.
    if PUMP is None or link._pump is None or link.transport != "tcp":
        pytest.skip("the link sleeps in Python")
    begun, may_wake, wait = threading.Event(), threading.Event(), link._pump.wait

    def sleep_long(*arguments: int) -> tuple[int, bool]:
        if threading.current_thread() is link._thread:
            begun.set()
            assert may_wake.wait(PATIENCE_S)
        return wait(*arguments)

    link._pump = link._pump._replace(wait=sleep_long)
    link._order(lambda: None)
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        may_wake.set()


def test_a_sleeping_thread_is_rung_once_for_many_items(pair: Pair) -> None:
    link, rings = driven(pair.source), []
    with asleep(link):
        assert link._pump is not None
        ring = link._pump.ring
        link._pump = link._pump._replace(ring=lambda fd: (rings.append(fd), ring(fd))[1])
        for index in range(20):
            link._queue(encode_frame(FrameKind.MESSAGE, bytes([index])))
        assert len(rings) <= 1
    assert pair.sink_owner.wait("message", 20) == [bytes([index]) for index in range(20)]


def test_items_that_are_queued_while_the_event_is_cleared_are_not_lost(pair: Pair) -> None:
    link, others = driven(pair.source), []
    if link._pump is None:
        pytest.skip("the event is cleared in Python")
    clear, has_cleared = link._pump.clear, threading.Event()

    def clear_while_another_queues(fd: int) -> int:
        if not others:
            item = encode_frame(FrameKind.MESSAGE, b"meanwhile")
            others.append(threading.Thread(target=link._queue, args=(item,)))
            others[0].start()
            eventually(lambda: bool(link._out._queue))
            # The other thread waits for its turn to ring, has rung, or need not ring.
            others[0].join(0.02)
        result = clear(fd)
        has_cleared.set()
        return result

    link._pump = link._pump._replace(clear=clear_while_another_queues)
    eventually(lambda: link._sleeps_long and link._sleepers > 0)
    link._queue(encode_frame(FrameKind.MESSAGE, b"first"))
    assert has_cleared.wait(PATIENCE_S)
    assert sorted(pair.sink_owner.wait("message", 2)) == [b"first", b"meanwhile"]  # type: ignore[type-var]
    others[0].join()
    for index in range(5):
        eventually(lambda: link._sleepers > 0)
        link._queue(encode_frame(FrameKind.MESSAGE, bytes([index])))
        pair.sink_owner.wait("message", index + 3)


def test_a_driver_does_not_wait_until_the_links_sleeping_thread_is_awake(pair: Pair) -> None:
    link = driven(pair.source)
    with asleep(link):
        link.send(b"meanwhile")
        assert link.drive(lambda: bool(pair.sink_owner.all("message")), PATIENCE_S)
    pair.sink.send(b"afterwards")
    assert pair.source_owner.wait("message") == [b"afterwards"]


def test_after_a_drive_through_a_large_window_a_short_message_arrives(
    stranger: tuple[socket.socket, Owner, Region],
) -> None:
    # For the large window, the driver waits for many bytes at once and shortens Python's switch
    # interval. Both must be undone before the short message.
    sock, owner, _ = stranger
    link, size, usual_s = driven(link_of(owner)), 1 << 20, sys.getswitchinterval()
    region = Region.over(np.zeros(size, np.uint8), 64 << 10, name="large")
    runs = ByteRuns(np.array([0]), np.array([0]), np.array([size]))
    owner.place = lambda head: WindowSlice(runs, region, 0, 0)
    link.secure(bytes(32))
    opening = encode_frame(
        FrameKind.WINDOW, pack_head(WindowHead(1, 0, 0, 0, 1, size)), size, PayloadProof.NONE
    )

    def send() -> None:
        sock.sendall(opening + b"\1" * (size - 300_000))
        eventually(lambda: link._polled_in > 1)
        sock.sendall(b"\1" * 300_000 + bytes(TRAILER_BYTES))

    with asleep(link):
        sender = threading.Thread(target=send)
        sender.start()
        assert link.drive(lambda: bool(owner.all("landed")), PATIENCE_S)
        sender.join()
    sock.sendall(encode_frame(FrameKind.MESSAGE, b"after"))
    assert owner.wait("message") == [b"after"]
    eventually(lambda: sys.getswitchinterval() == usual_s)


def test_after_a_drive_the_rest_of_a_tls_record_is_read() -> None:
    # poll(2) does not show what OpenSSL has decrypted already.
    with linked_pair("tls") as pair:
        link, peer = driven(pair.sink), driven(pair.source)
        with asleep(link):
            with paused(peer):
                for letter in (b"a", b"b"):
                    peer.send(letter * 7000)
            assert link.drive(lambda: bool(pair.sink_owner.all("message")), PATIENCE_S)
        eventually(lambda: len(pair.sink_owner.all("message")) == 2)


def test_a_drive_that_times_out_returns_false(pair: Pair) -> None:
    began = time.perf_counter()
    assert not driven(pair.source).drive(lambda: False, 0.05)
    assert 0.05 <= time.perf_counter() - began < PATIENCE_S


def test_a_drive_of_a_link_that_is_lost_raises(pair: Pair) -> None:
    threading.Timer(0.05, pair.sink.close).start()
    with pytest.raises(TransportError):
        driven(pair.source).drive(lambda: False, 20.0)
    pair.source_owner.wait("lost")
    with pytest.raises(TransportError):
        driven(pair.source).drive(lambda: False, 20.0)


def test_a_drive_after_the_end_uses_no_descriptor_that_is_closed(pair: Pair) -> None:
    link = driven(pair.source)
    link.close()
    link.join()
    link._was_rung = True
    with pytest.raises(TransportError, match="closed"):
        link.drive(lambda: False, 1.0)


def test_several_drivers_and_senders_lose_nothing(pair: Pair) -> None:
    def say(sender: int) -> None:
        for index in range(50):
            pair.source.send(bytes([sender, index]))
            driven(pair.source).drive(lambda: True, 1.0)

    threads = [threading.Thread(target=say, args=(sender,)) for sender in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = pair.sink_owner.wait("message", 150)
    assert sorted(heard) == sorted(
        bytes([sender, index]) for sender in range(3) for index in range(50)
    )  # type: ignore[type-var]


@contextlib.contextmanager
def paused(link: Link) -> Iterator[StreamLink]:
    # Keep the link's own thread from moving bytes during a `with` block.
    stream = driven(link)
    stream._count_drivers(1)
    stream._wake()
    with stream._driver_lock:
        yield stream
    stream._count_drivers(-1)


def test_a_message_is_written_by_its_sender_if_nothing_else_is_queued(pair: Pair) -> None:
    with paused(pair.source) as link:
        link.send(b"at once")
        assert pair.sink_owner.wait("message") == [b"at once"]
        assert link._out.is_idle


def test_a_message_waits_behind_the_windows_before_it(pair: Pair) -> None:
    head = window(7, WHOLE)
    pair.expect({head: WHOLE})
    with paused(pair.source) as link:
        link.accept(7, b"")
        pair.put(head, WHOLE)
        link.send(b"behind")
        assert not pair.sink_owner.all("message")
    pair.sink_owner.wait("message")
    kinds = [event.kind for event in pair.sink_owner.heard]
    assert kinds.index("incoming") < kinds.index("message")


def test_messages_beyond_the_room_of_the_socket_arrive_complete_and_in_order(pair: Pair) -> None:
    said = [bytes([number]) * (60 << 10) for number in range(200)]  # 12 MB
    with paused(pair.sink), paused(pair.source) as link:
        for message in said:
            link.send(message)
        assert not link._out.is_idle
    assert pair.sink_owner.wait("message", len(said)) == said


def test_nothing_is_written_to_a_socket_that_is_closed(pair: Pair) -> None:
    pair.source.close()
    driven(pair.source).join()
    pair.source.send(b"too late")
    pair.sink_owner.wait("lost")
    assert not pair.sink_owner.all("message")


def test_a_fence_on_the_links_own_thread_needs_no_wake_up(pair: Pair) -> None:
    link = driven(pair.sink)
    link._orders.append(lambda: link.fence(3))
    link._order(lambda: None)
    assert pair.sink_owner.wait("fenced") == [3]


def test_a_fence_during_a_drive_is_answered(pair: Pair) -> None:
    threading.Timer(0.02, lambda: pair.sink.fence(3)).start()
    assert driven(pair.sink).drive(lambda: bool(pair.sink_owner.all("fenced")), 20.0)


def test_an_owner_that_fails_loses_its_link_and_not_its_silence(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(head: WindowHead) -> WindowSlice | None:
        raise RuntimeError("the test's owner has no plan for this window")

    pair.sink_owner.place = fail
    moves = scattered(1, 3, 100)
    pair.admit(1)
    pair.put(window(1, moves), moves)
    assert pair.sink_owner.wait("lost") == ["this agent failed to handle an event of the link"]
    assert "the test's owner has no plan for this window" in caplog.text


def test_messages_sent_before_closing_arrive(pair: Pair) -> None:
    pair.source.send(b"farewell")
    pair.source.close()
    assert pair.sink_owner.wait("message") == [b"farewell"]
    pair.sink_owner.wait("lost")


def test_too_long_a_message_is_refused_by_the_sender(pair: Pair) -> None:
    with pytest.raises(ValueError, match="exceeds the limit"):
        pair.source.send(bytes(5 << 20))


def test_a_fence_does_not_wait_for_a_source_that_halts_in_the_middle_of_a_window(
    stranger: tuple[socket.socket, Owner, Region],
) -> None:
    sock, owner, region = stranger
    link, head = link_of(owner), WindowHead(1, 0, 0, 0, 1, SIZE)
    owner.place = lambda head: WindowSlice(WHOLE, region, 0, 0)
    link.secure(bytes(32))
    sock.sendall(
        encode_frame(FrameKind.WINDOW, pack_head(head), SIZE, PayloadProof.NONE)
        + b"\1" * (SIZE // 2)
    )
    owner.wait("incoming")
    while not region.bytes[SIZE // 2 - 1]:
        threading.Event().wait(0.002)
    link.fence(1)
    assert owner.wait("fenced") == [1]
    region.bytes[:] = 0
    sock.sendall(b"\2" * (SIZE // 2) + bytes(24) + encode_frame(FrameKind.MESSAGE, b"after"))
    owner.wait("message")
    assert not region.bytes.any()
    assert not owner.all("landed")


def test_bytes_of_a_large_window_that_trickle_in_show_that_the_peer_lives(
    stranger: tuple[socket.socket, Owner, Region],
) -> None:
    sock, owner, region = stranger
    link, opening = (
        link_of(owner),
        encode_frame(
            FrameKind.WINDOW, pack_head(WindowHead(1, 0, 0, 0, 1, SIZE)), SIZE, PayloadProof.NONE
        ),
    )
    owner.place = lambda head: WindowSlice(WHOLE, region, 0, 0)
    link.secure(bytes(32))
    sock.sendall(opening + b"\1" * 1000)
    owner.wait("incoming")
    for came in (2000, 3000):
        sock.sendall(b"\1" * 1000)
        deadline = time.monotonic() + 10
        while link.received_bytes < len(opening) + came:
            assert time.monotonic() < deadline
            threading.Event().wait(0.002)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",
        encode_frame(FrameKind.WINDOW, pack_head(WindowHead(1, 0, 0, 0, 1, 8)), 8) + bytes(8),
    ],
    ids=["another protocol", "a window without proof of identity"],
)
def test_an_unproven_peer_that_sends_anything_else_is_disconnected(
    stranger: tuple[socket.socket, Owner, Region], said: bytes
) -> None:
    sock, owner, _ = stranger
    sock.sendall(said)
    assert owner.wait("lost")
    sock.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    assert not owner.all("incoming")


@pytest.mark.parametrize("kind", [FrameKind.SHARED, FrameKind.REGIONS, FrameKind.TAKEN])
def test_frames_of_shared_memory_have_no_place_on_tcp(
    stranger: tuple[socket.socket, Owner, Region], kind: FrameKind
) -> None:
    sock, owner, _ = stranger
    link_of(owner).secure(bytes(32))
    sock.sendall(encode_frame(kind, bytes(41)))
    assert "not allowed over the transport tcp" in str(owner.wait("lost")[0])


def test_a_reset_loses_the_link_at_once(stranger: tuple[socket.socket, Owner, Region]) -> None:
    sock, owner, _ = stranger
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    assert owner.wait("lost")


@pytest.mark.parametrize(
    "address", ["", "nonsense", "127.0.0.1:x", "127.0.0.1:99999999", "127.0.0.1:1"]
)
def test_an_unreachable_address_is_a_transport_error(address: str) -> None:
    end = Tcp()
    end.start(Owner(), [])
    with pytest.raises(TransportError, match="cannot be reached"):
        end.dial(address)
    end.close()


def test_peers_get_the_advertised_address() -> None:
    end = Tcp("0.0.0.0", advertise="localhost")
    address = end.start(Owner(), [])
    assert address.startswith("localhost:")
    end.dial(address)
    end.close()


def test_a_port_that_is_taken_is_a_transport_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(TransportError, match="cannot listen"),
    ):
        Tcp(port=listener.getsockname()[1]).start(Owner(), [])


def test_the_two_directions_of_a_link_are_sealed_under_two_keys() -> None:
    pytest.importorskip("cryptography")
    sink_owner, source_owner = Owner(), Owner()
    one, other = Tcp(options=LinkOptions(sealed=True)), Tcp(options=LinkOptions(sealed=True))
    one.start(sink_owner, [])
    link = one.dial(other.start(source_owner, []))
    source_owner.wait("linked")
    far = source_owner.heard[0].link
    for end in (link, far):
        end.secure(bytes(range(32)))
    keys = [(end._out.seal._key.key, end._in.seal._key.key) for end in (link, far)]
    assert keys[0] == keys[1][::-1]
    assert keys[0][0] != keys[0][1]
    one.close()
    other.close()


@pytest.mark.parametrize(
    "options",
    [
        LinkOptions(checked=False),
        LinkOptions(checked=True),
        LinkOptions(sealed=True),
        LinkOptions(spin_s=0),
    ],
)
def test_windows_arrive_in_every_manner(options: LinkOptions) -> None:
    if options.sealed:
        pytest.importorskip("cryptography")
    sink_region, source_region = (
        MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name=name) for name in ("into", "out")
    )
    source_region.bytes[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    sink_owner, source_owner = Owner(), Owner()
    one, other = Tcp(options=options), Tcp(options=options)
    one.start(sink_owner, [sink_region])
    link = one.dial(other.start(source_owner, [source_region]))
    source_owner.wait("linked")
    for end in (link, source_owner.heard[0].link):
        end.secure(bytes(range(32)))
    sink_owner.place = lambda head: WindowSlice(WHOLE, sink_region, 0, 0)
    for index in range(5):
        source_owner.heard[0].link.put(
            WindowHead(1, 0, 0, index, 1, SIZE),
            WindowSlice(WHOLE, source_region, 0, 0, lambda: True),
        )
    assert {verdict for _, verdict in sink_owner.wait("landed", 5)} == {WindowVerdict.OK}  # type: ignore[misc]
    assert np.array_equal(sink_region.bytes, source_region.bytes)
    one.close()
    other.close()
