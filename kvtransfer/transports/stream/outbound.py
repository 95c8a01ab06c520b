"""The sending side of a socket connection between agents: messages, and KV straight from memory.

Any thread may queue them; one thread sends. link.py decides when to send, and owns the socket.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.layout.memory_regions import GenerationCheck
from kvtransfer.protocol.frame import (
    PROOF_BYTES,
    TRAILER_BYTES,
    PayloadProof,
    encode_trailer,
    encode_window_frame,
)
from kvtransfer.transport_interface import TransportError, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.copy_runs import are_within, gather, is_fine_grained
from kvtransfer.transports.iovec import NOTHING, Iovecs, MemoryPieces, address_of, writev
from kvtransfer.transports.pump import Digest, PumpCalls
from kvtransfer.transports.stream.kv_encryption import WindowSeal
from kvtransfer.transports.stream.window_batch import (
    FRAME_BYTES,
    LEAST_BYTES,
    MOST_BYTES,
    MOST_WINDOWS,
    WindowBatch,
)

_FULL_BYTES = 64 << 10  # buffered bytes at which no further frame is added
# A window this small is copied, so that it leaves in one call with its header and trailer, unless
# it has so many pieces that copying each costs more than the calls.
_STAGED_BYTES = 64 << 10
_STAGED_PIECES = 64
_SMALL_BYTES = _FULL_BYTES + _STAGED_BYTES + (4 << 10)
_AHEAD_BYTES = 256 << 10
_ZEROS = np.zeros(64 << 10, np.uint8)  # all links read these zeros, and none writes them
_ZEROS.flags.writeable = False
# Limit of the search for a spare window: the caller holds the agent's lock.
_MOST_LOOKS = 64
# The newest transfers only, because the end of a landed one is not reported here.
_MOST_SHARED = 256


class _Body:
    # The bytes of a window of KV or of a large message (without `head`), and the state of its
    # trailer.

    __slots__ = ("current", "digest", "head", "pieces", "tag", "verdict")

    def __init__(
        self,
        pieces: MemoryPieces,
        head: WindowHead | None = None,
        current: Callable[[], bool] | None = None,
    ) -> None:
        self.pieces = pieces
        self.head = head
        self.current = current
        self.verdict = WindowVerdict.OK
        self.digest: xxhash.xxh3_64 | Digest | None = None
        self.tag = b""

    def trailer(self) -> bytes:
        # Return the trailer of a window of KV whose last byte has been read, so that the verdict
        # covers all.
        #
        # The digest is only sent with OK, so that a flipped bit cannot turn another verdict into
        # OK.
        digest = self.digest.intdigest() if self.still_current() and self.digest is not None else 0
        return encode_trailer(self.verdict, self.tag or digest)

    def still_current(self) -> bool:
        if self.current is not None and not self.current():
            self.verdict = WindowVerdict.STALE
        return self.verdict is WindowVerdict.OK


class Outbound:
    """Writes messages and KV to the socket `fd`, in the order in which they were queued.

    sent     function that is called for each unit of KV (window) that has been read from memory
    checked  whether KV is followed by an xxh3 checksum
    calls    the native pump, which waits for room in the socket; while it is used, no other
             function writes. None: Python code writes
    """

    _writev: Any = staticmethod(writev)

    def __init__(
        self,
        fd: int,
        sent: Callable[[WindowHead], None],
        *,
        checked: bool,
        calls: PumpCalls | None = None,
    ) -> None:
        self.calls = calls
        self.is_blocked = False
        self.seal: WindowSeal | None = None
        self._fd = fd
        self._sent = sent
        self._checked = checked
        self._queue: deque[bytes | tuple[WindowHead, WindowSlice]] = deque()
        self._shared: dict[int, None] = {}
        self._withheld: set[int] = set()  # transfers that are about to be dropped
        self._body: _Body | None = None
        self._small, self._address = memoryview(bytearray()), 0  # allocated for the first frame
        self._begin = self._end = 0
        self._gate = threading.Lock()
        self._iovecs = Iovecs()
        self._bounce = np.empty(0, np.uint8)
        self._batch: WindowBatch | None = None  # allocated for the first batch

    def enqueue(self, item: bytes | tuple[WindowHead, WindowSlice]) -> None:
        """Queue a message (as a complete frame), or a unit of KV (window), for sending.

        It may be called on any thread.
        """
        with self._gate:
            self._queue.append(item)

    @property
    def is_idle(self) -> bool:
        return self._begin == self._end and not self._queue and self._body is None

    def send_at_once(self, frame: bytes) -> bool:
        """Write a message now if nothing is queued; otherwise do nothing and return False.

        If the socket has no room for a part of the message, that part is buffered. Errors of the
        socket are left to `send_available`.
        """
        if len(frame) > _STAGED_BYTES or not self.is_idle:
            return False
        self._append(frame)
        with contextlib.suppress(OSError):
            self._write_small()
        return True

    def release(self) -> None:
        """Free the send buffers of a connection that has ended.

        Otherwise remaining references to the connection could keep them in memory for a while.
        """
        self._body = self._batch = None
        self._small, self._address = memoryview(bytearray()), 0
        self._begin = self._end = 0
        self._bounce = np.empty(0, np.uint8)

    def drop(self, transfer: int) -> None:
        """Send no more of a KV transfer: drop its queued units (windows).

        A window that has begun is completed with zeros, and ends as STALE, because its memory may
        have other content now. An encrypted window was read completely before, so it stays OK.
        """
        with self._gate:
            remaining = [
                item
                for item in self._queue
                if isinstance(item, bytes) or item[0].transfer != transfer
            ]
            self._queue = deque(remaining)
            self._withheld.discard(transfer)
        body = self._body
        if (
            body is not None
            and body.head is not None
            and body.head.transfer == transfer
            and not body.tag
        ):
            body.pieces = MemoryPieces.over(_ZEROS, body.pieces.remaining, self._iovecs)
            body.digest = None
            body.verdict = WindowVerdict.STALE

    def allow_lanes(self, transfer: int) -> None:
        """Let the parallel connections (lanes) of this one send the KV of this transfer too.

        May be called on any thread.
        """
        with self._gate:
            if transfer not in self._withheld:
                self._shared[transfer] = None
            if len(self._shared) > _MOST_SHARED:
                del self._shared[next(iter(self._shared))]

    def deny_lanes(self, transfer: int) -> None:
        """Let the parallel connections (lanes) of this one send no more of a transfer that will be
        dropped.

        May be called on any thread, with locks held.
        """
        with self._gate:
            self._shared.pop(transfer, None)
            self._withheld.add(transfer)

    def take_spare(self) -> tuple[WindowHead, WindowSlice] | None:
        """Remove and return a queued window (unit of KV) for a parallel connection (lane) to send.

        Returns None if there is none. May be called on any thread.
        """
        with self._gate:
            index = self._spare_at()
            if index is None:
                return None
            item = self._queue[index]
            del self._queue[index]
            return item if isinstance(item, tuple) else None

    @property
    def has_spare(self) -> bool:
        """Return whether KV is queued that a parallel connection (lane) may send."""
        if not self._queue:
            return False
        with self._gate:
            return self._spare_at() is not None

    def _spare_at(self) -> int | None:
        # Return the queue index of the first window that a lane (parallel connection) may send, or
        # None.
        #
        # Call it with the gate held. The window that is sent next here is excluded.
        for index, item in enumerate(islice(self._queue, _MOST_LOOKS)):
            next_up = index == 0 and self._body is None
            if not next_up and isinstance(item, tuple) and item[0].transfer in self._shared:
                return index
        return None

    def send_available(self) -> bool:
        """Write queued bytes until the socket is full, or one large window of KV is written.

        A full socket sets `is_blocked`. Returns whether any byte was written.
        """
        moved = self.is_blocked = False
        while self._next():
            large = self._body
            wrote = self._write()
            moved = moved or wrote
            if not wrote or (self._body is not None and self._body.pieces.was_short):
                self.is_blocked = True
                break
            if large is not self._body and self._queue:
                break
        return moved

    def _next(self) -> bool:
        # Prepare the next items, until there is a large one or the buffer of small frames is full.
        #
        # Return whether there is anything to write.
        while self._body is None and self._queue and self._end < _FULL_BYTES:
            with self._gate:
                # A lane may have taken the last item.
                item = self._queue.popleft() if self._queue else b""
            if isinstance(item, tuple):
                self._begin_window(*item)
            else:
                self._begin_message(item)
        return self._body is not None or self._begin < self._end

    def _begin_message(self, message: bytes) -> None:
        if len(message) > _STAGED_BYTES:
            self._body = _Body(MemoryPieces.of_buffer(message, self._iovecs))
        else:
            self._append(message)

    def _append(self, data: bytes) -> None:
        if not self._address:
            small = np.empty(_SMALL_BYTES, np.uint8)
            self._small, self._address = small.data, address_of(small)
        end = self._end + len(data)
        self._small[self._end : end] = data
        self._end = end

    def _begin_window(self, head: WindowHead, window: WindowSlice) -> None:
        # Begin to send a window of KV; if its blocks changed owner, send only the header and STALE.
        if self.seal is None and is_fine_grained(window.runs, head.n_bytes):
            return self._begin_fine(head, window)
        checked = self._checked and self.seal is None and self.calls is None
        pieces = MemoryPieces.of_window(
            window.region, window.runs.src, window.runs.length, self._iovecs, fed=checked
        )
        if self.seal is not None:
            return self._begin_sealed(self.seal, _Body(pieces, head, window.is_current))
        proof = PayloadProof.XXH3 if self._checked else PayloadProof.NONE
        if window.is_current is not None and not window.is_current():
            self._append(encode_window_frame(head, 0, proof) + encode_trailer(WindowVerdict.STALE))
            return self._sent(head)
        self._append(encode_window_frame(head, pieces.size, proof))
        if pieces.size <= _STAGED_BYTES and pieces.count <= _STAGED_PIECES:
            return self._stage(pieces, head, window.is_current)
        self._body = body = _Body(pieces, head, window.is_current)
        if self._checked:
            body.digest = xxhash.xxh3_64() if self.calls is None else Digest()
        if pieces.size <= _AHEAD_BYTES and not self._queue:
            # Latency matters for a short window with nothing after it: the peer prepares while its
            # bytes are copied.
            self._write_small()
        return None

    def _begin_fine(self, head: WindowHead, window: WindowSlice) -> None:
        # Begin to send a window of many short pieces, which are copied to one buffer first.
        #
        # The copy fixes the verdict before anything is sent, so `drop` need not change bytes that
        # are being sent.
        runs, size = window.runs, window.runs.n_bytes
        proof = PayloadProof.XXH3 if self._checked else PayloadProof.NONE
        digest = xxhash.xxh3_64()
        if not are_within(window.region, runs.src, runs.length):
            raise TransportError(
                "a window (piece of KV) is empty or does not lie within the region "
                f"{window.region.name}"
            )
        body = _Body(
            MemoryPieces.in_order(self._bounce_of_size(size)[:size], size, self._iovecs),
            head,
            window.is_current,
        )
        if body.still_current():
            feed: Callable[[Any], object] = digest.update if self._checked else _ignore
            gather(window.region.bytes, runs.src, runs.length, self._bounce[:size], feed)
        if not body.still_current():
            self._append(encode_window_frame(head, 0, proof) + encode_trailer(WindowVerdict.STALE))
            return self._sent(head)
        self._append(encode_window_frame(head, size, proof))
        body.current, body.tag = None, digest.intdigest().to_bytes(PROOF_BYTES, "little")
        self._body = body
        return None

    def _bounce_of_size(self, size: int) -> NDArray[np.uint8]:
        # Return a buffer for one window, which is used again for the next.
        if self._bounce.size < size:
            self._bounce = np.empty(size, np.uint8)
        return self._bounce

    def _begin_sealed(self, seal: WindowSeal, body: _Body) -> None:
        # Encrypt a window of KV and begin to send it.
        #
        # Encryption copies it, so the verdict is known before anything is sent. For a stale window
        # only the sealed header is sent.
        assert body.head is not None
        head, size = body.head, body.pieces.size
        opening = encode_window_frame(head, size, PayloadProof.GCM)
        sealed = memoryview(b"")
        was_current = body.still_current()
        if was_current:
            sealed, body.tag = seal.close(body.pieces.parts(), size, opening)
        if not body.still_current():
            opening, sealed = encode_window_frame(head, 0, PayloadProof.GCM), memoryview(b"")
            body.tag = seal.void(opening, instead=was_current)
        self._append(opening)
        body.current, body.pieces = None, MemoryPieces.of_buffer(sealed, self._iovecs)
        if sealed:
            self._body = body
        else:
            self._finish(body)

    def _stage(
        self, pieces: MemoryPieces, head: WindowHead, current: Callable[[], bool] | None
    ) -> None:
        # Copy a small window of KV into the buffer after its header, and compute the digest of the
        # copy.
        end = self._end + pieces.size
        copy = self._small[self._end : end]
        pieces.gather(copy)
        self._end = end
        if current is None or current():
            self._append(
                encode_trailer(
                    WindowVerdict.OK, xxhash.xxh3_64_intdigest(copy) if self._checked else 0
                )
            )
        else:
            self._append(encode_trailer(WindowVerdict.STALE))
        self._sent(head)

    def _write(self) -> bool:
        body = self._body
        if body is None:
            return self._write_small()
        pieces, small = body.pieces, self._end - self._begin
        ahead = (self._address + self._begin, small)
        digest = body.digest if isinstance(body.digest, Digest) else None
        if self.calls is not None and self._can_lead(body):
            return self._write_windows(body, self.calls, digest)
        count = (
            pieces.call(self._writev, self._fd, ahead, NOTHING)
            if self.calls is None
            else pieces.move(self.calls, ahead, NOTHING, 0, digest)
        )
        if count is None:
            return False
        small_count = min(count, small)
        self._advance(small_count)
        pieces.advance(count - small_count)
        if body.digest is not None and digest is None:
            # The written bytes are in the cache, and the peer is busy.
            pieces.feed(body.digest.update, pieces.done)
        if not pieces.remaining:
            self._finish(body)
        return True

    @staticmethod
    def _can_lead(body: _Body) -> bool:
        # Return whether the pump may send other windows directly after this one, and decide this
        # one's verdict.
        return (
            isinstance(body.current, GenerationCheck)
            and body.verdict is WindowVerdict.OK
            and body.pieces.size >= LEAST_BYTES
        )

    def _write_windows(self, body: _Body, calls: PumpCalls, digest: Digest | None) -> bool:
        # Let the pump send a window and its trailer, and those that follow it, without Python in
        # between.
        batch = self._batch = self._batch or WindowBatch(calls)
        small = self._end - self._begin
        batch.begin(body.pieces, (self._address + self._begin, small))
        assert isinstance(body.current, GenerationCheck)
        batch.set_check(0, body.current)
        items, bodies = self._fill(batch, body.pieces.remaining)
        index = 0
        try:
            index, count, _ = batch.move(digest)
        finally:
            self._put_back(items[index:])
        if count is None:
            return False
        if index:
            for done in (body, *bodies[: index - 1]):
                assert done.head is not None
                self._sent(done.head)
            self._begin = self._end = 0
            self._body = body = bodies[index - 1]
            body.digest = digest
            small = TRAILER_BYTES + FRAME_BYTES
            self._append(batch.frame_bytes(index, 0))
        small_count = min(count, small)
        self._advance(small_count)
        trailer_count = count - small_count - body.pieces.remaining
        body.pieces.advance(count - small_count - max(0, trailer_count))
        body.pieces.was_short = body.pieces.remaining > 0
        if trailer_count > 0:
            # The pump has found the window's blocks current, and begun to say so.
            self._end_window(body, batch.last_trailer_bytes(trailer_count))
        elif not body.pieces.remaining:
            self._finish(body)
        return True

    def _fill(
        self, batch: WindowBatch, n_bytes: int
    ) -> tuple[list[tuple[WindowHead, WindowSlice]], list[_Body]]:
        # Add queued windows to a batch, whose first window has `n_bytes` left.
        #
        # Return the items taken from the queue, and a body for each.
        items, bodies = [], []
        while n_bytes < MOST_BYTES and batch.count < MOST_WINDOWS:
            item = self._take_following()
            if item is None:
                break
            head, window = item
            pieces = MemoryPieces.of_window(
                window.region, window.runs.src, window.runs.length, batch.next_iovecs()
            )
            assert isinstance(window.is_current, GenerationCheck)
            proof = PayloadProof.XXH3 if self._checked else PayloadProof.NONE
            header = encode_window_frame(head, pieces.size, proof)
            batch.add(pieces, header, window.is_current)
            bodies.append(_Body(pieces, head, window.is_current))
            items.append(item)
            n_bytes += pieces.size
        return items, bodies

    def _take_following(self) -> tuple[WindowHead, WindowSlice] | None:
        # Take the next item of the queue if it is a window that the pump may send in a batch.
        with self._gate:
            item = self._queue[0] if self._queue else b""
            if (
                isinstance(item, bytes)
                or item[0].transfer in self._shared
                or item[0].transfer in self._withheld
                or item[0].n_bytes <= _STAGED_BYTES
                or is_fine_grained(item[1].runs, item[0].n_bytes)
                or not isinstance(item[1].is_current, GenerationCheck)
            ):
                return None
            self._queue.popleft()
            return item

    def _put_back(self, items: list[tuple[WindowHead, WindowSlice]]) -> None:
        # Queue windows again that the pump has not begun, before all others.
        if items:
            with self._gate:
                self._queue.extendleft(reversed(items))

    def _write_small(self) -> bool:
        if self.calls is not None:
            count = self.calls.pump.send(
                self._fd, self._address + self._begin, self._end - self._begin
            )
            self._advance(max(0, count))
            return count >= 0
        try:
            self._advance(self._send(self._small[self._begin : self._end]))
        except BlockingIOError:
            return False
        return True

    def _send(self, data: memoryview) -> int:
        return os.write(self._fd, data)

    def _advance(self, count: int) -> None:
        self._begin += count
        if self._begin == self._end:
            self._begin = self._end = 0

    def _finish(self, body: _Body) -> None:
        self._end_window(body, body.trailer() if body.head is not None else b"")

    def _end_window(self, body: _Body, trailer: bytes) -> None:
        self._body = None
        self._append(trailer)
        if body.head is not None:
            self._sent(body.head)


def _ignore(part: object) -> None:
    # Do nothing with the bytes, because the window carries no digest.
    ...
