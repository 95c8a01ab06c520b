"""Outbound: what one end of a stream sends, in order: messages, and windows straight from the source's memory.

Fed from any thread, pumped by one. Not here: when to pump, the socket's life (stream.py).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.frame import PROOF_BYTES, Proof, trailer, window_frame
from kvtransfer.transports.base import Slice, TransportError, Verdict, WindowHead
from kvtransfer.transports.runs import fine, gather, within
from kvtransfer.transports.scatter import NOTHING, Iovecs, Pieces, address_of, writev
from kvtransfer.transports.seal import Seal

_FULL_BYTES = 64 << 10  # no more is laid out before it has been sent
_STAGED_BYTES = (
    64 << 10
)  # a window this small is copied, to leave in one call with its header and trailer,
_STAGED_PIECES = (
    64  # unless it is of so many pieces that copying each would cost more than the calls
)
_SMALL_BYTES = _FULL_BYTES + _STAGED_BYTES + (4 << 10)
_AHEAD_BYTES = 256 << 10
_ZEROS_BYTES = 64 << 10
_MOST_LOOKS = 64  # for a window to spare: whoever queues one holds the agent's lock meanwhile
_MOST_SHARED = 256  # transfers, the newest: nobody tells when one that has landed is over


class _Body:
    """Bytes on their way out: a window's, or a large message's (no head). What its trailer will say."""

    __slots__ = ("current", "digest", "head", "pieces", "tag", "verdict")

    def __init__(
        self,
        pieces: Pieces,
        head: WindowHead | None = None,
        current: Callable[[], bool] | None = None,
    ) -> None:
        self.pieces = pieces
        self.head = head
        self.current = current
        self.verdict = Verdict.OK
        self.digest: xxhash.xxh3_64 | None = None
        self.tag = b""

    def trailer(self) -> bytes:
        """Made when the last byte has been read from memory: what was read until now was read in time, or was not.

        The right digest goes along with OK alone: a bit that breaks on the way must not make OK of another verdict.
        """
        digest = self.digest.intdigest() if self.still_current() and self.digest is not None else 0
        return trailer(self.verdict, self.tag or digest)

    def still_current(self) -> bool:
        if self.current is not None and not self.current():
            self.verdict = Verdict.STALE
        return self.verdict is Verdict.OK


class Outbound:
    """Frames in, bytes out of `fd`. `sent` hears of each window that has been read; `checked`: windows carry xxh3."""

    _writev: Any = staticmethod(writev)

    def __init__(self, fd: int, sent: Callable[[WindowHead], None], *, checked: bool) -> None:
        self.blocked = False
        self.seal: Seal | None = None
        self._fd = fd
        self._sent = sent
        self._checked = checked
        self._queue: deque[bytes | tuple[WindowHead, Slice]] = deque()
        self._shared: dict[int, None] = {}
        self._kept: set[int] = set()  # transfers that are about to be dropped
        self._body: _Body | None = None
        small = np.empty(_SMALL_BYTES, np.uint8)
        self._small, self._address = small.data, address_of(small)
        self._begin = self._end = 0
        self._gate = threading.Lock()
        self._iovecs = Iovecs()
        self._zeros = np.zeros(_ZEROS_BYTES, np.uint8)
        self._bounce = np.empty(0, np.uint8)

    def queue(self, item: bytes | tuple[WindowHead, Slice]) -> None:
        """A whole frame, or a window. From any thread."""
        with self._gate:
            self._queue.append(item)

    @property
    def idle(self) -> bool:
        return not self._queue and self._body is None and self._begin == self._end

    def drop(self, transfer: int) -> None:
        """Forget its windows. Of one that has begun, zeros follow and the verdict is STALE: its memory is not ours.

        A sealed one had been read, in time, when it was sealed: it goes on as it is, and is OK. If it is the last that
        the sink has missed, the sink has landed what it was promised.
        """
        with self._gate:
            kept = [
                item
                for item in self._queue
                if isinstance(item, bytes) or item[0].transfer != transfer
            ]
            self._queue = deque(kept)
            self._kept.discard(transfer)
        body = self._body
        if (
            body is not None
            and body.head is not None
            and body.head.transfer == transfer
            and not body.tag
        ):
            body.pieces = Pieces.over(self._zeros, body.pieces.left, self._iovecs)
            body.digest = None
            body.verdict = Verdict.STALE

    def share(self, transfer: int) -> None:
        """From now on its windows may leave by another way as well. From any thread."""
        with self._gate:
            if transfer not in self._kept:
                self._shared[transfer] = None
            if len(self._shared) > _MOST_SHARED:
                del self._shared[next(iter(self._shared))]

    def keep(self, transfer: int) -> None:
        """It is about to be dropped: no other way finds a window of it any more. From any thread, with locks held."""
        with self._gate:
            self._shared.pop(transfer, None)
            self._kept.add(transfer)

    def spare(self) -> tuple[WindowHead, Slice] | None:
        """A window to be sent by another way, which is not this one's any more. From any thread."""
        with self._gate:
            at = self._spare_at()
            if at is None:
                return None
            found = self._queue[at]
            del self._queue[at]
            return found if isinstance(found, tuple) else None

    @property
    def crowded(self) -> bool:
        """Whether there is a window to spare."""
        if not self._queue:
            return False
        with self._gate:
            return self._spare_at() is not None

    def _spare_at(self) -> int | None:
        """Under the gate: where, among the first of the queue. What is next to be sent here is none to spare."""
        for at, item in enumerate(islice(self._queue, _MOST_LOOKS)):
            next_up = at == 0 and self._body is None
            if not next_up and isinstance(item, tuple) and item[0].transfer in self._shared:
                return at
        return None

    def pump(self) -> bool:
        """Write what there is, one large window at most, or until the socket takes no more (`blocked`).

        Whether anything was written.
        """
        moved = self.blocked = False
        while self._next():
            large = self._body
            wrote = self._write()
            moved = moved or wrote
            if not wrote or (large is not None and large.pieces.short):
                self.blocked = True
                break
            if large is not self._body and self._queue:
                break
        return moved

    def _next(self) -> bool:
        """Lay out what follows, until there are bytes of a body or the small frames fill their buffer."""
        while self._body is None and self._queue and self._end < _FULL_BYTES:
            with self._gate:
                item = (
                    self._queue.popleft() if self._queue else b""
                )  # it may just have gone another way
            if isinstance(item, tuple):
                self._begin_window(*item)
            else:
                self._utter(item)
        return self._body is not None or self._begin < self._end

    def _utter(self, message: bytes) -> None:
        if len(message) > _STAGED_BYTES:
            self._body = _Body(Pieces.of_buffer(message, self._iovecs))
        else:
            self._lay(message)

    def _lay(self, data: bytes) -> None:
        end = self._end + len(data)
        self._small[self._end : end] = data
        self._end = end

    def _begin_window(self, head: WindowHead, window: Slice) -> None:
        """A window whose source has lost its blocks already is only named, and nothing of it is read."""
        if self.seal is None and fine(window.runs, head.n_bytes):
            return self._begin_fine(head, window)
        checked = self._checked and self.seal is None
        pieces = Pieces.of_window(
            window.region, window.runs.src, window.runs.length, self._iovecs, fed=checked
        )
        if self.seal is not None:
            return self._begin_sealed(self.seal, _Body(pieces, head, window.current))
        proof = Proof.XXH3 if self._checked else Proof.NONE
        if window.current is not None and not window.current():
            self._lay(window_frame(head, 0, proof) + trailer(Verdict.STALE))
            return self._sent(head)
        self._lay(window_frame(head, pieces.size, proof))
        if pieces.size <= _STAGED_BYTES and pieces.count <= _STAGED_PIECES:
            return self._stage(pieces, head, window.current)
        self._body = body = _Body(pieces, head, window.current)
        if self._checked:
            body.digest = xxhash.xxh3_64()
        if pieces.size <= _AHEAD_BYTES and not self._queue:
            # It is short and nothing follows: the way counts. The peer makes ready while the bytes are copied.
            self._write_small()
        return None

    def _begin_fine(self, head: WindowHead, window: Slice) -> None:
        """Many short pieces are copied together first. So it is known before anything is sent whether they were read in
        time, and of what is sent then nothing is taken back (`drop`): it is no memory but ours."""
        runs, size = window.runs, window.runs.n_bytes
        proof = Proof.XXH3 if self._checked else Proof.NONE
        digest = xxhash.xxh3_64()
        if not within(window.region, runs.src, runs.length):
            raise TransportError(f"a window reaches beyond {window.region.name}, or is none")
        body = _Body(
            Pieces.in_order(self._room(size)[:size], size, self._iovecs), head, window.current
        )
        if body.still_current():
            feed: Callable[[Any], object] = digest.update if self._checked else _unheard
            gather(window.region.bytes, runs.src, runs.length, self._bounce[:size], feed)
        if not body.still_current():
            self._lay(window_frame(head, 0, proof) + trailer(Verdict.STALE))
            return self._sent(head)
        self._lay(window_frame(head, size, proof))
        body.current, body.tag = None, digest.intdigest().to_bytes(PROOF_BYTES, "little")
        self._body = body
        return None

    def _room(self, size: int) -> NDArray[np.uint8]:
        """Memory for one window, kept for the next."""
        if self._bounce.size < size:
            self._bounce = np.empty(size, np.uint8)
        return self._bounce

    def _begin_sealed(self, seal: Seal, body: _Body) -> None:
        """Sealing copies in any case, so it is known before anything is sent whether the memory was read in time. If it
        was not, nothing is sent of it: the header says so, and the header is sealed."""
        assert body.head is not None
        head, size = body.head, body.pieces.size
        opening = window_frame(head, size, Proof.GCM)
        sealed = memoryview(b"")
        began = body.still_current()
        if began:
            sealed, body.tag = seal.close(body.pieces.parts(), size, opening)
        if not body.still_current():
            opening, sealed = window_frame(head, 0, Proof.GCM), memoryview(b"")
            body.tag = seal.void(opening, instead=began)
        self._lay(opening)
        body.current, body.pieces = None, Pieces.of_buffer(sealed, self._iovecs)
        if sealed:
            self._body = body
        else:
            self._finish(body)

    def _stage(self, pieces: Pieces, head: WindowHead, current: Callable[[], bool] | None) -> None:
        """The digest is taken from the copy, which is in the cache. It goes along with OK alone, as in any trailer."""
        end = self._end + pieces.size
        copy = self._small[self._end : end]
        pieces.gather(copy)
        self._end = end
        if current is None or current():
            self._lay(trailer(Verdict.OK, xxhash.xxh3_64_intdigest(copy) if self._checked else 0))
        else:
            self._lay(trailer(Verdict.STALE))
        self._sent(head)

    def _write(self) -> bool:
        body = self._body
        if body is None:
            return self._write_small()
        pieces, small = body.pieces, self._end - self._begin
        count = pieces.call(self._writev, self._fd, (self._address + self._begin, small), NOTHING)
        if count is None:
            return False
        ahead = min(count, small)
        self._wrote(ahead)
        pieces.advance(count - ahead)
        if body.digest is not None:
            # What was written is in the cache, and the peer has something to do.
            pieces.feed(body.digest.update, pieces.done)
        if not pieces.left:
            self._finish(body)
        return True

    def _write_small(self) -> bool:
        try:
            self._wrote(self._send(self._small[self._begin : self._end]))
        except BlockingIOError:
            return False
        return True

    def _send(self, data: memoryview) -> int:
        return os.write(self._fd, data)

    def _wrote(self, count: int) -> None:
        self._begin += count
        if self._begin == self._end:
            self._begin = self._end = 0

    def _finish(self, body: _Body) -> None:
        self._body = None
        if body.head is not None:
            self._lay(body.trailer())
            self._sent(body.head)


def _unheard(part: object) -> None:
    """Where nothing is checked."""
