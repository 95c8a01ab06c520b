"""Frames: a small msgpack header and a raw payload, length-limited and checked. Sans-IO: bytes in, frames out.

    magic "KVF1" | header bytes u32 | payload bytes u64 | xxh3-64 of header and payload | header | payload

All numbers little-endian. Not here: sockets, what the headers mean, secrecy (the transport's business: a checksum
finds broken bytes, not forged ones).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

_PREAMBLE = struct.Struct("<4sIQQ")
_MAGIC = b"KVF1"


class FrameError(Exception):
    """The bytes are no frame of ours. The connection they came from cannot be trusted any further."""


class FrameLimits(msgspec.Struct, frozen=True):
    """The largest frame that is read or written. A peer cannot make us hold more than one of these."""

    header_bytes: int = 64 << 10
    payload_bytes: int = 64 << 20


class Frame(msgspec.Struct, frozen=True):
    """One message: named fields, and bytes that nobody looks into."""

    header: Mapping[str, Any]
    payload: bytes = b""


def encode(frame: Frame, limits: FrameLimits) -> tuple[bytes, bytes]:
    """The frame as (preamble and header, payload): two buffers for one gathering write. FrameError if too large."""
    header = msgspec.msgpack.encode(frame.header)
    _check_sizes(len(header), len(frame.payload), limits)
    preamble = _PREAMBLE.pack(_MAGIC, len(header), len(frame.payload), _checksum(header, frame.payload))
    return preamble + header, frame.payload


class FrameDecoder:
    """Turns a stream of bytes, however cut, into frames. One per connection; useless after a FrameError."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames completed by `data`, in order. Raises FrameError as soon as the bytes cannot become a frame."""
        self._buffer += data
        frames, at = [], 0
        while (frame := self._next(at)) is not None:
            frames.append(frame[0])
            at = frame[1]
        del self._buffer[:at]
        return frames

    def end(self) -> None:
        """The stream has ended. Raises FrameError in the middle of a frame."""
        if self._buffer:
            raise FrameError(f"the stream ended {len(self._buffer)} bytes into a frame")

    def _next(self, at: int) -> tuple[Frame, int] | None:
        """The frame that begins at `at` and where it ends; None while it is incomplete."""
        if len(self._buffer) - at < _PREAMBLE.size:
            if not _MAGIC.startswith(self._buffer[at : at + len(_MAGIC)]):
                raise FrameError("this is no frame: wrong magic")
            return None
        magic, header_bytes, payload_bytes, checksum = _PREAMBLE.unpack_from(self._buffer, at)
        if magic != _MAGIC:
            raise FrameError("this is no frame: wrong magic")
        _check_sizes(header_bytes, payload_bytes, self._limits)
        middle = at + _PREAMBLE.size + header_bytes
        end = middle + payload_bytes
        if len(self._buffer) < end:
            return None
        header, payload = bytes(self._buffer[middle - header_bytes : middle]), bytes(self._buffer[middle:end])
        if _checksum(header, payload) != checksum:
            raise FrameError("the frame is damaged: checksum differs")
        return Frame(_fields(header), payload), end


def _fields(header: bytes) -> dict[str, Any]:
    try:
        return msgspec.msgpack.decode(header, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise FrameError(f"the header is no map from names to values: {wrong}") from wrong


def _check_sizes(header_bytes: int, payload_bytes: int, limits: FrameLimits) -> None:
    if header_bytes > limits.header_bytes:
        raise FrameError(f"a header of {header_bytes} bytes is over the limit of {limits.header_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise FrameError(f"a payload of {payload_bytes} bytes is over the limit of {limits.payload_bytes}")


def _checksum(header: bytes, payload: bytes) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return digest.intdigest()
