"""The messages between a store and its clients, and their limits.

A message is its length (four bytes, little-endian), followed by MessagePack. After the message
`Wanted`, a writer sends each requested block as its digest and its content, without framing.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvtransfer.store.block_keys import Key, are_keys
from kvtransfer.store.slot_format import SlotGeometry

VERSION = 1
LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 20
MAX_KEYS = 1 << 14
MAX_PUT_KEYS = 1 << 12
MAX_LEASE_KEYS = 1 << 10


class StoreProtocolError(Exception):
    """Raised for a message that is malformed, too long, or not expected at that point."""


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """The first message of a client to the KV store: the version of its protocol."""

    version: int


class StoreDescription(msgspec.Struct, frozen=True, tag=True):
    """The store's response to Greeting. It comes with the descriptor of the store's memory file."""

    version: int
    geometry: SlotGeometry


class CountPrefix(msgspec.Struct, frozen=True, tag=True):
    """Asks how many of these blocks are stored, counted up to the first missing one."""

    keys: list[Key]


class PrefixCount(msgspec.Struct, frozen=True, tag=True):
    count: int


class FindPlaces(msgspec.Struct, frozen=True, tag=True):
    """Asks which tiers have each of these blocks. The response is Places."""

    keys: list[Key]


class Places(msgspec.Struct, frozen=True, tag=True):
    """The response to FindPlaces: one byte per block, with the bits of the tiers that have it."""

    bits: bytes


class AcquireBlocks(msgspec.Struct, frozen=True, tag=True):
    """Asks to lease the longest stored prefix of these blocks, for reading.

    The response is LeasedSlots.
    """

    keys: list[Key]


class LeasedSlots(msgspec.Struct, frozen=True, tag=True):
    """The response to AcquireBlocks: the number of the lease, and the places (slots) of its blocks.

    The slots are in the memory file, in the order of the keys. They are not reused while the lease
    is open.
    """

    lease: int
    slots: list[int]


class ReleaseLease(msgspec.Struct, frozen=True, tag=True):
    """A client's message that ends a lease, so that the store may reuse its slots.

    There is no response.
    """

    lease: int


class UseBlocks(msgspec.Struct, frozen=True, tag=True):
    """A client's report that consecutive blocks of a prompt were used.

    There is no response.
    """

    keys: list[Key]


class PutBlocks(msgspec.Struct, frozen=True, tag=True):
    """Offers blocks to the store, with their lengths in bytes. The response is Wanted."""

    keys: list[Key]
    lengths: list[int]


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """The response to PutBlocks: the indexes of the offered blocks that the writer must send
    now.
    """

    indexes: list[int]


class StoredCount(msgspec.Struct, frozen=True, tag=True):
    count: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """A client's request for the counters of the KV store."""


class StatsReport(msgspec.Struct, frozen=True, tag=True):
    values: dict[str, int]


ToStore: TypeAlias = (
    Greeting
    | CountPrefix
    | FindPlaces
    | AcquireBlocks
    | ReleaseLease
    | UseBlocks
    | PutBlocks
    | GetStats
)
ToClient: TypeAlias = (
    StoreDescription | PrefixCount | Places | LeasedSlots | Wanted | StoredCount | StatsReport
)

_encoder = msgspec.msgpack.Encoder()
_to_store: msgspec.msgpack.Decoder[ToStore] = msgspec.msgpack.Decoder(ToStore)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToStore | ToClient) -> bytes:
    """Return a message to or from the KV store as bytes, with its length in front."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def body_length(prefix: bytes) -> int:
    """Return the length of the next message. Raises StoreProtocolError if it is out of range."""
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise StoreProtocolError(
            f"a message of {length} bytes is empty or exceeds the limit of {MAX_MESSAGE_BYTES}"
        )
    return length


def decode_request(body: bytes) -> ToStore:
    """Decode a message of a client. Raises StoreProtocolError if it is malformed."""
    try:
        message = _to_store.decode(body)
    except msgspec.MsgspecError as error:
        raise StoreProtocolError(str(error)) from None
    _check_limits(message)
    return message


def decode_answer(body: bytes) -> ToClient:
    """Decode a message of a store. Raises StoreProtocolError if it is malformed."""
    try:
        return _to_client.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreProtocolError(str(error)) from None


def _check_limits(message: ToStore) -> None:
    most = MAX_KEYS
    if isinstance(message, PutBlocks):
        most = MAX_PUT_KEYS
        if len(message.keys) != len(message.lengths) or min(message.lengths, default=0) < 0:
            raise StoreProtocolError(
                "each key of a message needs one length, which must not be negative"
            )
    elif isinstance(message, AcquireBlocks):
        most = MAX_LEASE_KEYS
    keys = getattr(message, "keys", [])
    if len(keys) > most or not are_keys(keys):
        raise StoreProtocolError(
            f"a message with {len(keys)} keys is invalid: it may have at most {most}, all of "
            "the right length"
        )
