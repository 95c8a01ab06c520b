"""The control messages of an RDMA connection between two agents, sent over TCP as msgpack. No I/O.

RDMA itself carries only writes of KV. Control messages need another connection, because a refused
write ends a queue pair (one end of an RDMA connection).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvtransfer.transport_interface import (
    MAX_UNPROVEN_BYTES,
    TransportError,
    WindowHead,
    WindowVerdict,
)
from kvtransfer.transports.rdma.verbs import QueuePairAddress

MOST_FRAME_BYTES = 8 << 20
_LENGTH = struct.Struct("<I")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class QueuePairSetup(
    msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True
):
    """The message with which an agent describes its end of an RDMA connection to the other agent.

    An end is called a queue pair. When one ends, a new pair replaces it, whose number `epoch` is
    higher by one. An agent that receives a newer epoch than its own also creates a new one.
    """

    epoch: Count
    card: QueuePairAddress


class QueuePairReady(
    msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True
):
    """The message that an agent's end of the RDMA connection can be written to from now on.

    Its number is `epoch`.
    """

    epoch: Count


class RdmaTrailer(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """The sending agent's message that a unit of KV (window) has been written completely.

    number   number of the window
    verdict  whether the source's blocks were unchanged while they were read
    digest   xxh3-64 checksum of the bytes; None without checksums
    at       position in the sink's staging buffer; None: the window was written directly into the
             blocks
    """

    number: Count
    head: WindowHead
    verdict: WindowVerdict
    digest: Annotated[int, msgspec.Meta(ge=0)] | None = None
    at: Count | None = None


class OwnerMessage(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """A message between the agents, which an RDMA connection passes on without reading it."""

    data: bytes


class GrantWithdrawn(
    msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True
):
    """The receiving agent's message that no more KV of a transfer may be written into its memory.

    The memory keys that permitted it are no longer valid.
    """

    transfer: Count


ControlMessage = QueuePairSetup | QueuePairReady | RdmaTrailer | OwnerMessage | GrantWithdrawn

_DECODER: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ControlMessage) -> bytes:
    """Encode a control message, with its length in front.

    Raises TransportError if it is too long.
    """
    body = _ENCODER.encode(message)
    if len(body) > MOST_FRAME_BYTES:
        raise TransportError(
            f"a control message of {len(body)} bytes exceeds the limit of {MOST_FRAME_BYTES} bytes"
        )
    return _LENGTH.pack(len(body)) + body


class ControlDecoder:
    """Decodes control messages from a stream of bytes. Unusable after a TransportError.

    most_bytes  maximum length of a message; it is small until `raise_limit` is called
    """

    def __init__(self) -> None:
        self.most_bytes = MAX_UNPROVEN_BYTES
        self._buffer = bytearray()

    def raise_limit(self) -> None:
        """Allow longer messages, because the other agent has proven its identity."""
        self.most_bytes = MOST_FRAME_BYTES

    @property
    def room_bytes(self) -> int:
        """Return how many bytes may be passed to feed() now.

        With at most this many, the decoder never buffers more than one message.
        """
        return self.most_bytes + _LENGTH.size - len(self._buffer)

    def feed(self, data: bytes) -> Iterator[ControlMessage]:
        """Yield the control messages that `data` completes.

        The caller must consume all of them before it feeds more. Raises TransportError for invalid
        data. A call of `raise_limit` while consuming applies to the next message.
        """
        self._buffer += data
        return self._complete_messages()

    def _complete_messages(self) -> Iterator[ControlMessage]:
        offset = 0
        while len(self._buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, offset)
            if length > self.most_bytes:
                raise TransportError(
                    f"a control message of {length} bytes exceeds the limit of {self.most_bytes}"
                )
            end = offset + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield _decode(bytes(self._buffer[offset + _LENGTH.size : end]))
            offset = end
        del self._buffer[:offset]


def _decode(body: bytes) -> ControlMessage:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise TransportError(f"a received control message is invalid: {error}") from error
