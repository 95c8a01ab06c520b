"""The receiving side of a socket connection between agents: messages, and KV written to its place.

Lengths are checked before anything is read. Bytes are written only where this agent's own plan
places them. link.py decides when to read, and owns the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.protocol.frame import (
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    WINDOW_HEADER_BYTES,
    FrameError,
    FrameHeader,
    FrameKind,
    FrameLimits,
    PayloadProof,
    decode_header,
    decode_trailer,
    encode_window_frame,
    unpack_head,
    verify_header,
)
from kvtransfer.transport_interface import WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.copy_runs import are_within, is_fine_grained, scatter
from kvtransfer.transports.iovec import (
    IN_CACHE,
    NOTHING,
    Iovecs,
    MemoryPieces,
    Stretch,
    address_of,
    readv,
)
from kvtransfer.transports.pump import Digest, PumpCalls
from kvtransfer.transports.stream.kv_encryption import WindowSeal
from kvtransfer.transports.stream.window_batch import (
    LEAST_BYTES,
    MOST_BYTES,
    MOST_WINDOWS,
    WindowBatch,
)

_STAGE_BYTES = 8 << 10  # room for a whole window of 4 KiB
_READS = 8  # reads of one payload before other work gets a turn
_SCRATCH_BYTES = 64 << 10
# Bytes to read beyond the end of a window: its trailer and the next window's header, no payload.
_BEHIND_WINDOW = TRAILER_BYTES + PREAMBLE_BYTES + WINDOW_HEADER_BYTES
_LARGE_BYTES = 256 << 10
_WORTH_BYTES = 512 << 10  # wake up for this much of a large payload


class InboundListener(Protocol):
    """The interface of the object to which Inbound (the receiving side) reports messages and KV."""

    def on_frame(self, kind: FrameKind, header: bytes) -> None:
        """Handle a received frame (unit of the connection) that carries no KV."""
        ...

    def place_window(self, head: WindowHead) -> WindowSlice | None: ...

    def following_windows(
        self, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        """Return the units of KV (windows) that will probably follow; see WindowForecaster."""
        ...

    def on_landed(self, head: WindowHead, verdict: WindowVerdict) -> None: ...

    def on_intact_windows(self, heads: Sequence[WindowHead]) -> None:
        """Handle that several units of KV (windows) have arrived intact; see WindowForecaster."""
        ...


class _Arrival:
    # A payload that is being received.
    #
    # window  where a window is written; None: its bytes are discarded
    # head    header of a window; None for a large message
    # proof   how its trailer proves that a window is intact

    __slots__ = (
        "bounce",
        "digest",
        "head",
        "message",
        "opening",
        "pieces",
        "proof",
        "sealed",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        pieces: MemoryPieces,
        head: WindowHead | None = None,
        window: WindowSlice | None = None,
    ) -> None:
        self.pieces = pieces
        self.head = head
        self.window = window
        self.message: tuple[FrameHeader, bytearray] | None = None
        self.digest: xxhash.xxh3_64 | Digest | None = None
        self.proof = PayloadProof.NONE
        self.opening = b""
        self.sealed: bytearray | None = None
        self.bounce: NDArray[np.uint8] | None = None

    @property
    def is_batchable(self) -> bool:
        # Whether it is a window that the pump may receive together with others.
        is_plain = self.window is not None and self.bounce is None and self.sealed is None
        return is_plain and self.pieces.size >= LEAST_BYTES


class Inbound:
    """Reads the socket `fd`, writes received KV to its place, and reports it and messages to
    `listener`.

    `receive` works like socket.recv_into. It is not used with the native pump (C code).
    """

    _readv: Any = staticmethod(readv)

    def __init__(
        self,
        fd: int,
        receive: Callable[[memoryview], int],
        listener: InboundListener,
        limits: FrameLimits,
        calls: PumpCalls | None = None,
    ) -> None:
        self.calls = calls
        self.limits = limits
        self.seal: WindowSeal | None = None
        self._fd = fd
        self._receive = receive
        self._listener = listener
        self._arrival: _Arrival | None = None
        stage = np.empty(_STAGE_BYTES, np.uint8)
        self._stage, self._address = stage.data, address_of(stage)
        self._begin = self._end = 0
        self._received_bytes = 0  # bytes outside batches; the pump counts those of batches
        self._iovecs = Iovecs()
        self._scratch: NDArray[np.uint8] | None = None  # allocated for the first discarded payload
        self._bounce = np.empty(0, np.uint8)
        self._batch: WindowBatch | None = None  # allocated for the first batch
        # The windows that the pump has verified, until they are reported with the batch's last.
        self._intact: list[WindowHead] = []
        self._digest: Digest | None = None
        # The window that has just landed, if the pump may wait for those that follow it.
        self._landed: _Arrival | None = None
        self._was_short = False

    @property
    def is_drained(self) -> bool:
        """Return whether the socket is empty, and no more KV is expected soon.

        Always False without the native pump, because TLS may hold bytes that poll does not show.
        """
        return self._was_short and self._landed is None

    @property
    def received_bytes(self) -> int:
        """Return the number of bytes received so far. May be read on any thread."""
        return self._received_bytes + (0 if self._batch is None else self._batch.received_bytes)

    @property
    def is_in_payload(self) -> bool:
        """Return whether the next bytes continue KV or a large message that has begun."""
        return self._arrival is not None and self._arrival.pieces.remaining > 0

    @property
    def is_idle(self) -> bool:
        """Return whether the next bytes begin a message or KV, so that poll(2) shows them."""
        return not self.is_in_payload

    @property
    def is_in_large_payload(self) -> bool:
        """Return whether much KV, or a large message, is being received.

        Then it is better to wait longer and read more per call.
        """
        arrival = self._arrival
        return arrival is not None and arrival.pieces.size > _LARGE_BYTES

    @property
    def wanted_bytes(self) -> int:
        """Return the number of bytes for which to wait before the next read.

        It is more than 1 while many bytes of KV are expected, to avoid many short reads.
        """
        arrival = self._arrival
        return (
            max(1, min(_WORTH_BYTES, arrival.pieces.remaining))
            if arrival is not None and self.is_in_large_payload
            else 1
        )

    def discard_transfer(self, transfer: int) -> None:
        """Discard all bytes that arrive for this KV transfer from now on; write none of them."""
        arrival, self._landed = self._arrival, None
        if arrival is None or arrival.head is None or arrival.head.transfer != transfer:
            return
        if arrival.sealed is None:
            arrival.pieces = self._discarded(arrival.pieces.remaining)
        arrival.window = arrival.digest = None

    def release(self) -> None:
        """Free the receive buffers of a connection that has ended.

        Otherwise remaining references to the connection could keep them in memory for a while.
        """
        self._arrival = self._landed = None
        self._received_bytes, self._batch = self.received_bytes, None
        self._stage, self._begin, self._end = memoryview(bytearray()), 0, 0
        self._scratch, self._bounce = None, np.empty(0, np.uint8)

    def receive_available(self) -> bool:
        """Read the socket once and handle the received bytes; return False if there are none.

        Raises EOFError, FrameError or OSError when the connection is over.
        """
        try:
            return self._receive_once()
        except Exception:
            self._report_intact()  # the pump verified them before the byte that ends the connection
            raise

    def _receive_once(self) -> bool:
        self._was_short = False
        arrival = self._arrival
        if self._receive_behind():
            pass
        elif arrival is None or not arrival.pieces.remaining:
            if not self._read_frames():
                return False
            is_short = self._end < _STAGE_BYTES and self.calls is not None
            self._handle_all()
            arrival = self._arrival
            if arrival is None or not arrival.pieces.remaining:
                self._was_short = is_short
                return True
            # A window's bytes arrive with its header or right after it.
            self._read_body(arrival)
        elif not self._read_body(arrival):
            return False
        if not self.is_in_payload:
            is_short = self._end < _BEHIND_WINDOW and self.calls is not None
            self._handle_all()
            self._was_short = is_short and not self.is_in_payload
        return True

    def _handle_all(self) -> None:
        while self._handle_next():
            pass
        self._compact()

    def _read_body(self, arrival: _Arrival) -> bool:
        # Read a payload to its end, or a few times; return False if the socket is empty.
        pieces = arrival.pieces
        behind: Stretch = (self._address, _BEHIND_WINDOW) if arrival.head is not None else NOTHING
        if self.calls is not None:
            following = self._following(arrival, MOST_WINDOWS - 1)
            if following:
                return self._pump_windows(arrival, following, self.calls)
            return self._pump_body(arrival, self.calls, behind)
        for _ in range(_READS):
            count = pieces.call(self._readv, self._fd, NOTHING, behind)
            if count is None:
                return False
            self._count_received(count)
            payload_count = min(count, pieces.remaining)
            self._end = count - payload_count
            self._on_payload(arrival, payload_count)
            if not pieces.remaining:
                break
            if pieces.was_short:
                return False
        return True

    def _pump_body(self, arrival: _Arrival, calls: PumpCalls, behind: Stretch) -> bool:
        # Do the same as _read_body(), but let the pump wait up to calls.patience_ms for the bytes.
        pieces = arrival.pieces
        digest = arrival.digest if isinstance(arrival.digest, Digest) else None
        optional = max(0, behind[1] - TRAILER_BYTES)
        count = pieces.move(calls, NOTHING, behind, optional, digest)
        if count is None:
            return False
        self._count_received(count)
        payload_count = min(count, pieces.remaining)
        self._end = count - payload_count
        pieces.advance(payload_count)
        return True

    def _following(self, arrival: _Arrival, most: int) -> Sequence[tuple[WindowHead, WindowSlice]]:
        # Return the windows that the pump may receive behind this one, without Python in between.
        if arrival.head is None or not arrival.is_batchable:
            return ()
        return self._listener.following_windows(arrival.head, most)

    def _receive_behind(self) -> bool:
        # Let the pump wait for the windows that follow the last one, and receive them.
        #
        # Otherwise the link's thread would sleep, and need the interpreter lock again before it
        # reads them. Return False if nothing came: the source may halt for long.
        landed, calls = self._landed, self.calls
        if landed is None or calls is None or self._arrival or self._end or not calls.may_wait():
            return False
        self._landed = None
        following = self._following(landed, MOST_WINDOWS)
        if not following or not self._pump_windows(landed, following, calls):
            return False
        if self._arrival is None:
            self._landed = landed  # a message came instead
        return True

    def _pump_windows(
        self,
        arrival: _Arrival,
        following: Sequence[tuple[WindowHead, WindowSlice]],
        calls: PumpCalls,
    ) -> bool:
        # Do the same as _pump_body() for a window and the ones that probably follow it. If it has
        # landed, receive only those.
        batch = self._batch = self._batch or WindowBatch(calls)
        n_bytes = left = arrival.pieces.remaining
        batch.begin(arrival.pieces if left else None)
        arrivals = [arrival] if left else []
        for head, window in following:
            n_bytes += head.n_bytes
            if n_bytes > MOST_BYTES or is_fine_grained(window.runs, head.n_bytes):
                break
            pieces = MemoryPieces.of_window(
                window.region, window.runs.dst, window.runs.length, batch.next_iovecs()
            )
            batch.add(pieces, encode_window_frame(head, pieces.size, arrival.proof), None)
            arrivals.append(_Arrival(pieces, head, window))
        if not arrivals:
            return False
        digest = arrival.digest if isinstance(arrival.digest, Digest) else None
        if digest is not None and not left:
            digest.reset()
        index, count, all_bytes = batch.move(digest, self._address)
        if count is None:
            return False
        if not all_bytes:
            self._count_received(0)
        self._note_begun(arrivals[: index + 1], arrival, digest)
        if index < 0:
            self._end = count
            return True
        self._arrival = last = arrivals[index]
        payload_count = min(count, last.pieces.remaining)
        self._end = count - payload_count
        last.pieces.advance(payload_count)
        if last.window is None:
            last.pieces = self._discarded(last.pieces.remaining)
        if last.pieces.remaining or self._end < TRAILER_BYTES:
            self._report_intact()  # the rest of the last window may come much later
        return True

    def _note_begun(self, arrivals: list[_Arrival], first: _Arrival, digest: Digest | None) -> None:
        # Place the windows that the pump has begun, but not `first`, and note those that it has
        # verified: all but the last.
        for index, arrival in enumerate(arrivals, start=1):
            assert arrival.head is not None
            if arrival is not first:
                arrival.window = self._listener.place_window(arrival.head)
                arrival.proof = first.proof
                arrival.digest = None if arrival.window is None else digest
            if index < len(arrivals) and arrival.window is not None:
                self._intact.append(arrival.head)

    def _report_intact(self) -> None:
        # Report the windows of a batch together: a credit for each would cost the source a turn.
        heads, self._intact = self._intact, []
        if len(heads) > 1:
            self._listener.on_intact_windows(heads)
        elif heads:
            self._listener.on_landed(heads[0], WindowVerdict.OK)

    def _read_frames(self) -> bool:
        if self.calls is not None:
            end = self._end
            count = self.calls.pump.receive(self._fd, self._address + end, _STAGE_BYTES - end)
            if count < 0:
                return False
        else:
            try:
                count = self._receive(self._stage[self._end :])
            except BlockingIOError:
                return False
        self._count_received(count)
        self._end += count
        return True

    def _count_received(self, count: int) -> None:
        if not count:
            raise EOFError("the other agent closed the connection before a whole frame had arrived")
        self._received_bytes += count

    def _on_payload(self, arrival: _Arrival, count: int) -> None:
        pieces = arrival.pieces
        pieces.advance(count)
        if arrival.digest is not None and (
            not pieces.remaining or pieces.was_short or pieces.unfed_bytes >= IN_CACHE
        ):
            # The bytes are still in the cache. If the socket is empty, there is time anyway.
            pieces.feed(arrival.digest.update, pieces.done)

    def _handle_next(self) -> bool:
        # Handle the next complete item in the buffer; return False if more bytes are needed.
        arrival, have = self._arrival, self._end - self._begin
        if arrival is None:
            return have >= PREAMBLE_BYTES and self._open(have)
        if arrival.pieces.remaining:
            return False
        if arrival.message is not None:
            return self._close_message(*arrival.message)
        if have < TRAILER_BYTES:
            return False
        self._close_window(arrival)
        return True

    def _open(self, have: int) -> bool:
        # Begin to handle a frame of which `have` bytes are buffered.
        #
        # Return False if that is too few.
        data = self._stage[self._begin : self._end]
        announced = decode_header(data, self.limits)
        size = PREAMBLE_BYTES + announced.header_bytes
        if size > _STAGE_BYTES:
            self._open_message(announced, data)
            return True
        if have < size:
            return False
        verify_header(data[:size], announced)
        self._begin += size
        if announced.kind is FrameKind.WINDOW:
            self._open_window(announced, data[:size])
        else:
            self._handle_frame(announced, bytes(data[PREAMBLE_BYTES:size]))
        return True

    def _handle_frame(self, announced: FrameHeader, header: bytes) -> None:
        if announced.payload_bytes:
            raise FrameError(f"a frame of kind {announced.kind.name} must have no payload")
        self._listener.on_frame(announced.kind, header)

    def _open_message(self, announced: FrameHeader, data: memoryview) -> None:
        # Receive a message that is too large for the common buffer in a separate buffer.
        #
        # The size of the message has been checked.
        message = bytearray(PREAMBLE_BYTES + announced.header_bytes)
        message[: len(data)] = data
        self._arrival = _Arrival(MemoryPieces.of_buffer(message, self._iovecs))
        self._arrival.message = (announced, message)
        self._arrival.pieces.advance(len(data))
        self._begin = self._end

    def _close_message(self, announced: FrameHeader, data: bytearray) -> bool:
        verify_header(memoryview(data), announced)
        self._arrival = None
        self._handle_frame(announced, bytes(data[PREAMBLE_BYTES:]))
        return True

    def _open_window(self, announced: FrameHeader, frame_bytes: memoryview) -> None:
        # Begin to receive a window of KV.
        #
        # The owner's plan says where it goes, and its size must match the plan before any byte is
        # written.
        head = unpack_head(frame_bytes[PREAMBLE_BYTES:])
        if (announced.proof is PayloadProof.GCM) != (self.seal is not None):
            raise FrameError(
                "only one end of the connection encrypts KV; both ends need the same option "
                "`sealed`"
            )
        if announced.payload_bytes not in (0, head.n_bytes):
            raise FrameError(
                f"the frame of a window (piece of KV) of {head.n_bytes} bytes has "
                f"{announced.payload_bytes} bytes of payload"
            )
        self._landed = None
        window = self._listener.place_window(head)
        bounce: NDArray[np.uint8] | None = None
        if window is None or not announced.payload_bytes:
            pieces = self._discarded(announced.payload_bytes)
        elif self.seal is None and is_fine_grained(window.runs, head.n_bytes):
            bounce = self._bounce_buffer(window, head.n_bytes)
            pieces = MemoryPieces.in_order(bounce, IN_CACHE, self._iovecs)
        else:
            fed = announced.proof is PayloadProof.XXH3 and self.calls is None
            pieces = MemoryPieces.of_window(
                window.region, window.runs.dst, window.runs.length, self._iovecs, fed=fed
            )
            if pieces.size != head.n_bytes:
                raise FrameError(
                    f"a received window (piece of KV) has {head.n_bytes} bytes, but "
                    f"{pieces.size} bytes are planned"
                )
        arrival = _Arrival(pieces, head, window)
        arrival.bounce, arrival.proof = bounce, announced.proof
        if self.seal is not None:
            arrival.opening, arrival.sealed = bytes(frame_bytes), bytearray(announced.payload_bytes)
            arrival.pieces = MemoryPieces.of_buffer(arrival.sealed, self._iovecs)
        elif announced.proof is PayloadProof.XXH3 and window is not None:
            arrival.digest = xxhash.xxh3_64() if self.calls is None else self._new_digest()
        self._arrival = arrival
        self._copy_staged(arrival)

    def _new_digest(self) -> Digest:
        # Windows arrive one after the other, so they may share a digest.
        if self._digest is None:
            self._digest = Digest()
        else:
            self._digest.reset()
        return self._digest

    def _discarded(self, size: int) -> MemoryPieces:
        if self._scratch is None:
            self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        return MemoryPieces.over(self._scratch, size, self._iovecs)

    def _bounce_buffer(self, window: WindowSlice, n_bytes: int) -> NDArray[np.uint8]:
        runs = window.runs
        if runs.n_bytes != n_bytes or not are_within(window.region, runs.dst, runs.length):
            raise FrameError(
                f"a window (piece of KV) of {n_bytes} bytes was announced, but {runs.n_bytes} "
                "bytes are planned, or they do not lie within the region"
            )
        if self._bounce.size < n_bytes:
            self._bounce = np.empty(n_bytes, np.uint8)
        return self._bounce[:n_bytes]

    def _copy_staged(self, arrival: _Arrival) -> None:
        count = min(self._end - self._begin, arrival.pieces.remaining)
        if count:
            data = self._stage[self._begin : self._begin + count]
            arrival.pieces.put(data)
            self._begin += count
            if isinstance(arrival.digest, Digest):
                arrival.digest.update(data)
                arrival.pieces.advance(count)
            else:
                self._on_payload(arrival, count)

    def _close_window(self, arrival: _Arrival) -> None:
        verdict, proof = decode_trailer(self._stage[self._begin :])
        self._begin += TRAILER_BYTES
        self._arrival = None
        if self.seal is not None and arrival.sealed is not None:
            self._unseal(self.seal, arrival, arrival.sealed, proof)
        window, head = arrival.window, arrival.head
        if window is None or head is None:
            return self._report_intact()
        if not arrival.pieces.size:
            verdict = WindowVerdict.STALE
        elif verdict is WindowVerdict.OK and not _matches_proof(arrival, proof):
            verdict = WindowVerdict.CORRUPT
        elif verdict is WindowVerdict.OK and arrival.bounce is not None:
            scatter(arrival.bounce, window.region.bytes, window.runs.dst, window.runs.length)
        if verdict is WindowVerdict.OK:
            self._intact.append(head)
            self._landed = arrival if self.calls is not None and arrival.is_batchable else None
            return self._report_intact()
        self._report_intact()
        return self._listener.on_landed(head, verdict)

    def _unseal(self, seal: WindowSeal, arrival: _Arrival, sealed: bytearray, tag: bytes) -> None:
        # Decrypt a window of KV, and write it only after verification. Raises WindowSealError.
        plain = seal.open(sealed, tag, arrival.opening)
        if arrival.window is not None and plain:
            runs = arrival.window.runs
            MemoryPieces.of_window(arrival.window.region, runs.dst, runs.length, self._iovecs).put(
                plain
            )

    def _compact(self) -> None:
        left = self._end - self._begin
        if left and self._begin:
            self._stage[:left] = self._stage[self._begin : self._end]
        self._begin, self._end = 0, left


def _matches_proof(arrival: _Arrival, proof: bytes) -> bool:
    return arrival.digest is None or int.from_bytes(proof, "little") == arrival.digest.intdigest()
