"""The side channel of an RDMA link: what its two ends say to each other over TCP, as length-limited msgpack. Sans-IO.

Queue pairs carry nothing but one-sided writes. Everything else goes here, because a queue pair ends with the first
write that is refused, and what must be said then must not end with it. Not here: sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvtransfer.transports.base import STRANGER_BYTES, TransportError, Verdict, WindowHead
from kvtransfer.transports.verbs import Card

MOST_FRAME_BYTES = 8 << 20
_LENGTH = struct.Struct("<I")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Both: my queue pair number `epoch` of this link. Whoever hears of a newer one than its own makes one, too."""

    epoch: Count
    card: Card


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Both: my queue pair of this epoch is connected to yours; you may write."""

    epoch: Count


class Trailer(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Source: window `number` has been written and its memory read; this is the verdict, and xxh3-64 of its bytes.

    `at`: where the window begins in the sink's staging memory; None: it was written in place.
    """

    number: Count
    head: WindowHead
    verdict: Verdict
    digest: Annotated[int, msgspec.Meta(ge=0)] | None = None
    at: Count | None = None


class Control(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Both: a message of the link's owner."""

    data: bytes


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Sink: the keys of this transfer are no more."""

    transfer: Count


Saying = Setup | Ready | Trailer | Control | Withdrawn

_DECODER: msgspec.msgpack.Decoder[Saying] = msgspec.msgpack.Decoder(Saying)
_ENCODER = msgspec.msgpack.Encoder()


def encode(saying: Saying) -> bytes:
    body = _ENCODER.encode(saying)
    if len(body) > MOST_FRAME_BYTES:
        raise TransportError(f"{len(body)} bytes are too much for one message")
    return _LENGTH.pack(len(body)) + body


class Ear:
    """Turns a stream of bytes, however cut, into sayings. Useless after a TransportError.

    most_bytes   no saying is longer: little, until the peer has proven itself (`trust`)
    """

    def __init__(self) -> None:
        self.most_bytes = STRANGER_BYTES
        self._buffer = bytearray()

    def trust(self) -> None:
        self.most_bytes = MOST_FRAME_BYTES

    @property
    def room(self) -> int:
        """How many bytes may be fed at most: no more is ever held than one saying."""
        return self.most_bytes + _LENGTH.size - len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Saying]:
        """What `data` completes, in order; to be taken to the end before more is fed. TransportError as soon as it can
        be nothing of ours. What one saying brings about (`trust`) holds for the next."""
        self._buffer += data
        return self._whole()

    def _whole(self) -> Iterator[Saying]:
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > self.most_bytes:
                raise TransportError(f"the peer announces a message of {length} bytes")
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield _decode(bytes(self._buffer[at + _LENGTH.size : end]))
            at = end
        del self._buffer[:at]


def _decode(body: bytes) -> Saying:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as wrong:
        raise TransportError(f"the peer says what nobody says: {wrong}") from wrong
