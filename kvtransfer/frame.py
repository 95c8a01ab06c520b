"""Frames: what a connection between two agents carries, as bytes. Length-limited, checked, sans-IO.

    magic "KVF2" | xxh3-64 of the rest and the header | kind u8 | proof u8 | 0 u16 | header bytes u32 | payload u64
    header
    payload, and behind it (windows alone) a trailer: verdict u8 | 0 | 16 bytes of proof

A message is a header without payload. A window's header says which runs of the plan follow. What the source found out
only while it read its memory follows the bytes, in the trailer. All numbers are little-endian.
Not here: sockets, where payloads go (transports/inbound.py), who sent this (a checksum finds broken bytes, not forged).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec
import xxhash

from kvtransfer.transports.base import Verdict, WindowHead

_MAGIC = b"KVF2"
_CHECKED = struct.Struct("<4sQ")
_FIELDS = struct.Struct("<BBHIQ")
_PREAMBLE = struct.Struct("<4sQBBHIQ")
_HEAD = struct.Struct("<QIIIIQ")
_FIELDS_AND_HEAD = struct.Struct("<BBHIQQIIIIQ")
_TRAILER = struct.Struct("<B7x16s")
_VERDICTS = (Verdict.OK, Verdict.STALE, Verdict.CORRUPT)

PREAMBLE_BYTES = _PREAMBLE.size
WINDOW_HEADER_BYTES = _HEAD.size
TRAILER_BYTES = _TRAILER.size
PROOF_BYTES = 16


class FrameError(Exception):
    """The bytes are no frame of ours. The connection they came from cannot be trusted any further."""


class Kind(IntEnum):
    """WINDOW: the bytes follow. SHARED, REGIONS, TAKEN: where they go another way (shm).
    SPREAD: the windows of a transfer may come by any lane from now on."""

    MESSAGE = 1
    WINDOW = 2
    SHARED = 3
    REGIONS = 4
    TAKEN = 5
    SPREAD = 7


class Proof(IntEnum):
    """What the trailer proves about the payload."""

    NONE = 0
    XXH3 = 1  # that nothing was broken on the way
    GCM = 2  # that it, its header and its verdict were written by who has the key, in this order


_KINDS = {int(kind): kind for kind in Kind}
_PROOFS = tuple(Proof)


MOST_PAYLOAD = 64 << 20


class FrameLimits(msgspec.Struct, frozen=True):
    """The largest frame that is read or written. A peer cannot make us hold more than one header."""

    header_bytes: int = 16 << 10
    payload_bytes: int = MOST_PAYLOAD


class Opening(NamedTuple):
    """A frame's first bytes, believed as far as their checksum and the limits go."""

    kind: Kind
    proof: Proof
    header_bytes: int
    payload_bytes: int
    checksum: int


def frame(kind: Kind, header: bytes, payload_bytes: int = 0, proof: Proof = Proof.NONE) -> bytes:
    """Preamble and header. The payload is to follow."""
    return _checked(_FIELDS.pack(kind, proof, 0, len(header), payload_bytes) + header)


def window_frame(head: WindowHead, payload_bytes: int, proof: Proof) -> bytes:
    """The frame ahead of a window's bytes. FrameError for a head of numbers that nobody has."""
    try:
        fields = (head.transfer, head.group, head.pair, head.first, head.count, head.n_bytes)
        return _checked(
            _FIELDS_AND_HEAD.pack(Kind.WINDOW, proof, 0, _HEAD.size, payload_bytes, *fields)
        )
    except struct.error as wrong:
        raise FrameError(f"{head} does not fit into a header: {wrong}") from wrong


def opening(data: memoryview, limits: FrameLimits) -> Opening:
    """What the first PREAMBLE_BYTES of `data` announce. FrameError if that is nothing, or too much."""
    magic, checksum, kind, proof, zero, header_bytes, payload_bytes = _PREAMBLE.unpack_from(data)
    if magic != _MAGIC or zero:
        raise FrameError("this is no frame: wrong magic")
    if header_bytes > limits.header_bytes:
        raise FrameError(
            f"a header of {header_bytes} bytes is over the limit of {limits.header_bytes}"
        )
    if payload_bytes > limits.payload_bytes:
        raise FrameError(
            f"a payload of {payload_bytes} bytes is over the limit of {limits.payload_bytes}"
        )
    if not (kind in _KINDS and proof < len(_PROOFS)):
        raise FrameError(f"a frame of kind {kind} with proof {proof} is none of ours")
    return Opening(_KINDS[kind], _PROOFS[proof], header_bytes, payload_bytes, checksum)


def verify(whole: memoryview, announced: Opening) -> None:
    """FrameError unless preamble and header, behind each other, are what was sent."""
    if xxhash.xxh3_64_intdigest(whole[_CHECKED.size :]) != announced.checksum:
        raise FrameError("the frame is damaged: checksum differs")


def pack_head(head: WindowHead) -> bytes:
    try:
        return _HEAD.pack(
            head.transfer, head.group, head.pair, head.first, head.count, head.n_bytes
        )
    except struct.error as wrong:
        raise FrameError(f"{head} does not fit into a header: {wrong}") from wrong


def unpack_head(header: bytes | memoryview) -> WindowHead:
    if len(header) < _HEAD.size:
        raise FrameError(f"{len(header)} bytes are no window's header")
    return WindowHead(*_HEAD.unpack_from(header))


def trailer(verdict: Verdict, proof: bytes | int = 0) -> bytes:
    """`proof`: an xxh3-64 digest or a GCM tag."""
    data = proof.to_bytes(PROOF_BYTES, "little") if isinstance(proof, int) else proof
    return _TRAILER.pack(_VERDICTS.index(verdict), data)


def read_trailer(data: memoryview) -> tuple[Verdict, bytes]:
    """The source's verdict and its proof, from the first TRAILER_BYTES."""
    verdict, proof = _TRAILER.unpack_from(data)
    if verdict >= len(_VERDICTS):
        raise FrameError(f"a verdict {verdict} is none of ours")
    return _VERDICTS[verdict], proof


def _checked(data: bytes) -> bytes:
    return _CHECKED.pack(_MAGIC, xxhash.xxh3_64_intdigest(data)) + data
