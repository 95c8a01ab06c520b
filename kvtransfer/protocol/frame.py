"""Frames on a connection between two agents: length-limited, with a checksum; without I/O.

    magic "KVF2" | xxh3-64 of everything behind it, header included
    kind u8 | proof u8 | 0 u16 | header bytes u32 | payload bytes u64
    header
    payload, and after it (only for a window) a trailer: verdict u8 | 0 | 16 bytes of proof

A message is a header without a payload. A window's header names the runs of the plan that follow;
its trailer states whether the source's blocks changed while they were read. Numbers are
little-endian. A checksum finds damaged bytes, not forged ones. transports/stream/inbound.py decides
where payloads are written.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec
import xxhash

from kvtransfer.transport_interface import WindowHead, WindowVerdict

_MAGIC = b"KVF2"
_CHECKED = struct.Struct("<4sQ")
_FIELDS = struct.Struct("<BBHIQ")
_PREAMBLE = struct.Struct("<4sQBBHIQ")
_HEAD = struct.Struct("<QIIIIQ")
_FIELDS_AND_HEAD = struct.Struct("<BBHIQQIIIIQ")
_TRAILER = struct.Struct("<B7x16s")
_VERDICTS = (WindowVerdict.OK, WindowVerdict.STALE, WindowVerdict.CORRUPT)

PREAMBLE_BYTES = _PREAMBLE.size
WINDOW_HEADER_BYTES = _HEAD.size
TRAILER_BYTES = _TRAILER.size
PROOF_BYTES = 16


class FrameError(Exception):
    """Raised when bytes are not a valid frame, so that no further bytes of this connection can be
    trusted.
    """


class FrameKind(IntEnum):
    """The kind of a frame between two agents.

    MESSAGE  a control message
    WINDOW   a window (piece of KV), whose bytes follow
    REGIONS  the source's memory files, whose descriptors come with the frame (transports/shm.py)
    SHARED   a window that the sink copies from these files itself
    TAKEN    the sink's message that it has copied such a window
    SPREAD   from now on, the transfer's windows may use any lane (parallel connection)
    """

    MESSAGE = 1
    WINDOW = 2
    SHARED = 3
    REGIONS = 4
    TAKEN = 5
    SPREAD = 7


class PayloadProof(IntEnum):
    """How the trailer of a frame proves that its payload is intact: not at all, by a checksum, or
    by an authentication tag.
    """

    NONE = 0
    XXH3 = 1  # the payload is undamaged
    # Payload, header and verdict were written, in this order, by a holder of the key.
    GCM = 2


_KINDS = {int(kind): kind for kind in FrameKind}
_PROOFS = tuple(PayloadProof)


MAX_PAYLOAD_BYTES = 64 << 20


class FrameLimits(msgspec.Struct, frozen=True):
    """Limits on the bytes of one frame, for reading and for writing.

    So a peer cannot make an agent buffer more than one header.
    """

    header_bytes: int = 16 << 10
    payload_bytes: int = MAX_PAYLOAD_BYTES


class FrameHeader(NamedTuple):
    """The decoded start of a frame, within the limits but not yet verified by its checksum."""

    kind: FrameKind
    proof: PayloadProof
    header_bytes: int
    payload_bytes: int
    checksum: int


def encode_frame(
    kind: FrameKind, header: bytes, payload_bytes: int = 0, proof: PayloadProof = PayloadProof.NONE
) -> bytes:
    """Encode the preamble and header of a frame; the caller sends the payload after it."""
    return _checked(_FIELDS.pack(kind, proof, 0, len(header), payload_bytes) + header)


def encode_window_frame(head: WindowHead, payload_bytes: int, proof: PayloadProof) -> bytes:
    """Encode the start of the frame that precedes the bytes of a window (piece of a KV transfer).

    Raises FrameError for out-of-range numbers.
    """
    try:
        fields = (head.transfer, head.group, head.pair, head.first, head.count, head.n_bytes)
        return _checked(
            _FIELDS_AND_HEAD.pack(FrameKind.WINDOW, proof, 0, _HEAD.size, payload_bytes, *fields)
        )
    except struct.error as error:
        raise FrameError(f"the window header {head} cannot be encoded: {error}") from error


def decode_header(data: memoryview, limits: FrameLimits) -> FrameHeader:
    """Decode the first PREAMBLE_BYTES of `data` to a FrameHeader.

    Raises FrameError if they are invalid or announce more than the limits.
    """
    magic, checksum, kind, proof, zero, header_bytes, payload_bytes = _PREAMBLE.unpack_from(data)
    if magic != _MAGIC or zero:
        raise FrameError("the received bytes are not a frame: wrong magic number")
    if header_bytes > limits.header_bytes:
        raise FrameError(
            f"a frame header of {header_bytes} bytes exceeds the limit of {limits.header_bytes}"
        )
    if payload_bytes > limits.payload_bytes:
        raise FrameError(
            f"a frame payload of {payload_bytes} bytes exceeds the limit of {limits.payload_bytes}"
        )
    if not (kind in _KINDS and proof < len(_PROOFS)):
        raise FrameError(f"a frame has the unknown kind {kind} or proof {proof}")
    return FrameHeader(_KINDS[kind], _PROOFS[proof], header_bytes, payload_bytes, checksum)


def verify_header(data: memoryview, announced: FrameHeader) -> None:
    """Raise FrameError unless a frame's preamble and header match their checksum."""
    if xxhash.xxh3_64_intdigest(data[_CHECKED.size :]) != announced.checksum:
        raise FrameError("a frame is damaged: its checksum differs")


def pack_head(head: WindowHead) -> bytes:
    """Encode a WindowHead as bytes. Raises FrameError for out-of-range numbers."""
    try:
        return _HEAD.pack(
            head.transfer, head.group, head.pair, head.first, head.count, head.n_bytes
        )
    except struct.error as error:
        raise FrameError(f"the window header {head} cannot be encoded: {error}") from error


def unpack_head(header: bytes | memoryview) -> WindowHead:
    """Decode a WindowHead. Raises FrameError if the bytes are too few."""
    if len(header) < _HEAD.size:
        raise FrameError(f"{len(header)} bytes are too few for a window header")
    return WindowHead(*_HEAD.unpack_from(header))


def encode_trailer(verdict: WindowVerdict, proof: bytes | int = 0) -> bytes:
    """Encode the trailer of a window (piece of a KV transfer); `proof` is an xxh3-64 digest or a
    GCM tag.
    """
    data = proof.to_bytes(PROOF_BYTES, "little") if isinstance(proof, int) else proof
    return _TRAILER.pack(_VERDICTS.index(verdict), data)


def decode_trailer(data: memoryview) -> tuple[WindowVerdict, bytes]:
    """Return the source's verdict and the proof in a trailer. Raises FrameError if invalid."""
    verdict, proof = _TRAILER.unpack_from(data)
    if verdict >= len(_VERDICTS):
        raise FrameError(f"the window's trailer has the unknown verdict {verdict}")
    return _VERDICTS[verdict], proof


def _checked(data: bytes) -> bytes:
    return _CHECKED.pack(_MAGIC, xxhash.xxh3_64_intdigest(data)) + data
