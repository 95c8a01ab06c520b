"""Frames, the units of bytes on a connection between two agents: how they are encoded and checked.

    magic "KVF2" | xxh3-64 of everything behind it, header included
    kind u8 | proof u8 | 0 u16 | header bytes u32 | payload bytes u64
    header
    payload, and after it (only for a window) a trailer: verdict u8 | 0 | 16 bytes of proof

Numbers are little-endian. A control message is a header without a payload. A window is a part of
the KV of a transfer: its header names the byte ranges that follow. Its trailer says whether the
source's blocks changed while they were read.

A checksum finds damaged bytes, not forged ones. Lengths are limited. transports/stream/inbound.py
decides where payloads are written. This module does no I/O.
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
    """Raised for bytes that are not a valid frame. The connection must then be closed."""


class FrameKind(IntEnum):
    """The kinds of frames between two agents.

    MESSAGE  a control message
    WINDOW   a window: some bytes of KV, which follow
    REGIONS  the source's memory files; their descriptors come with the frame (transports/shm.py)
    SHARED   a window whose bytes the sink itself copies from these files
    TAKEN    the sink's report that it has copied such a window
    SPREAD   from now on, windows of this transfer may use any parallel connection (lane)
    """

    MESSAGE = 1
    WINDOW = 2
    SHARED = 3
    REGIONS = 4
    TAKEN = 5
    SPREAD = 7


class PayloadProof(IntEnum):
    """How a frame proves that its payload arrived intact: not at all, by a checksum or by a tag.

    A tag also authenticates encrypted bytes. Checksum or tag follow the payload, in the trailer.
    """

    NONE = 0
    XXH3 = 1  # the payload is undamaged
    # Payload, header and verdict were written, in this order, by a holder of the key.
    GCM = 2


_KINDS = {int(kind): kind for kind in FrameKind}
_PROOFS = tuple(PayloadProof)


MAX_PAYLOAD_BYTES = 64 << 20


class FrameLimits(msgspec.Struct, frozen=True):
    """Maximum bytes of one frame's header and payload.

    With these limits, an agent never buffers more than one header for a peer.
    """

    header_bytes: int = 16 << 10
    payload_bytes: int = MAX_PAYLOAD_BYTES


class FrameHeader(NamedTuple):
    """The decoded start of a frame. Its sizes are within the limits; its checksum is not
    verified.
    """

    kind: FrameKind
    proof: PayloadProof
    header_bytes: int
    payload_bytes: int
    checksum: int


def encode_frame(
    kind: FrameKind, header: bytes, payload_bytes: int = 0, proof: PayloadProof = PayloadProof.NONE
) -> bytes:
    """Encode the start of a frame and its header. The caller sends the payload after it."""
    return _checked(_FIELDS.pack(kind, proof, 0, len(header), payload_bytes) + header)


def encode_window_frame(head: WindowHead, payload_bytes: int, proof: PayloadProof) -> bytes:
    """Encode the start of a frame that carries KV; the caller sends the KV bytes after it.

    head           header of the window: which bytes of the transfer follow
    payload_bytes  how many bytes follow
    proof          how the trailer after them proves that they are intact

    Raises FrameError if a number is out of range.
    """
    try:
        fields = (head.transfer, head.group, head.pair, head.first, head.count, head.n_bytes)
        return _checked(
            _FIELDS_AND_HEAD.pack(FrameKind.WINDOW, proof, 0, _HEAD.size, payload_bytes, *fields)
        )
    except struct.error as error:
        raise FrameError(
            f"the header of a window (piece of KV) cannot be encoded: {error} ({head})"
        ) from error


def decode_header(data: memoryview, limits: FrameLimits) -> FrameHeader:
    """Decode the first PREAMBLE_BYTES of `data` to a FrameHeader.

    Raises FrameError if they are invalid or announce more than the limits.
    """
    magic, checksum, kind, proof, zero, header_bytes, payload_bytes = _PREAMBLE.unpack_from(data)
    if magic != _MAGIC or zero:
        raise FrameError("the received bytes are not a frame: they do not begin with KVF2")
    if header_bytes > limits.header_bytes:
        raise FrameError(
            f"a frame header of {header_bytes} bytes exceeds the limit of {limits.header_bytes}"
        )
    if payload_bytes > limits.payload_bytes:
        raise FrameError(
            f"a frame payload of {payload_bytes} bytes exceeds the limit of {limits.payload_bytes}"
        )
    if not (kind in _KINDS and proof < len(_PROOFS)):
        raise FrameError(f"a frame's kind ({kind}) or proof ({proof}) is unknown")
    return FrameHeader(_KINDS[kind], _PROOFS[proof], header_bytes, payload_bytes, checksum)


def verify_header(data: memoryview, announced: FrameHeader) -> None:
    """Raise FrameError if the start of a frame was damaged on the way, as its checksum shows."""
    if xxhash.xxh3_64_intdigest(data[_CHECKED.size :]) != announced.checksum:
        raise FrameError("a frame was damaged on the way: its checksum is wrong")


def pack_head(head: WindowHead) -> bytes:
    """Encode which bytes of a transfer a frame carries, as the frame's header.

    Raises FrameError for out-of-range numbers.
    """
    try:
        return _HEAD.pack(
            head.transfer, head.group, head.pair, head.first, head.count, head.n_bytes
        )
    except struct.error as error:
        raise FrameError(
            f"the header of a window (piece of KV) cannot be encoded: {error} ({head})"
        ) from error


def unpack_head(header: bytes | memoryview) -> WindowHead:
    """Decode from a frame's header which bytes of a transfer follow.

    Raises FrameError if there are too few bytes.
    """
    if len(header) < _HEAD.size:
        raise FrameError(
            f"the header of a received window (piece of KV) is too short: {len(header)} bytes"
        )
    return WindowHead(*_HEAD.unpack_from(header))


def encode_trailer(verdict: WindowVerdict, proof: bytes | int = 0) -> bytes:
    """Encode the end of a frame that carries KV, sent after the KV bytes.

    verdict  whether the sender's blocks stayed unchanged while they were read
    proof    xxh3-64 digest or GCM tag of the KV bytes
    """
    data = proof.to_bytes(PROOF_BYTES, "little") if isinstance(proof, int) else proof
    return _TRAILER.pack(_VERDICTS.index(verdict), data)


def decode_trailer(data: memoryview) -> tuple[WindowVerdict, bytes]:
    """Decode the end of a frame that carries KV; see encode_trailer().

    Returns whether the sender's blocks stayed unchanged, and the digest or tag of the bytes. Raises
    FrameError if the trailer is invalid.
    """
    verdict, proof = _TRAILER.unpack_from(data)
    if verdict >= len(_VERDICTS):
        raise FrameError(
            f"a received window (piece of KV) has the unknown verdict {verdict} in its trailer"
        )
    return _VERDICTS[verdict], proof


def _checked(data: bytes) -> bytes:
    return _CHECKED.pack(_MAGIC, xxhash.xxh3_64_intdigest(data)) + data
