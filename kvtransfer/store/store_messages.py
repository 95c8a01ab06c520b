"""The messages between a KV store and the engines that use it (clients), and their limits.

A message is its length (four bytes, little-endian), followed by MessagePack. After the message
`Wanted`, a writer sends each requested block as its digest and its content, without framing.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvtransfer.store.block_keys import KEY_BYTES, Key, are_keys
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
    """The store's response to Greeting: the limits of the store.

    With it comes the descriptor of the store's memory file, from which the client reads blocks.
    """

    version: int
    geometry: SlotGeometry


class CountPrefix(msgspec.Struct, frozen=True, tag=True):
    """A client's question how many of a prompt's blocks are stored, up to the first missing one."""

    keys: list[Key]


class PrefixCount(msgspec.Struct, frozen=True, tag=True):
    count: int


class FindPlaces(msgspec.Struct, frozen=True, tag=True):
    """A client's question in which tiers (memory, disk) each of these blocks is stored.

    The response is Places.
    """

    keys: list[Key]


class Places(msgspec.Struct, frozen=True, tag=True):
    """The store's response to FindPlaces: for each block, a byte with bits of its tiers."""

    bits: bytes


class AcquireBlocks(msgspec.Struct, frozen=True, tag=True):
    """A client's request to read blocks of a prompt from memory, up to the first that is missing.

    The response is LeasedSlots.
    """

    keys: list[Key]


class LeasedSlots(msgspec.Struct, frozen=True, tag=True):
    """The store's permission to read blocks, in response to AcquireBlocks: a lease and their
    places.

    A place (slot) is a number in the memory file. The slots are in the order of the keys, and are
    not reused while the lease is open.
    """

    lease: int
    slots: list[int]


class ReleaseLease(msgspec.Struct, frozen=True, tag=True):
    """A client's message that it has read the blocks of a lease, so that the store may reuse them.

    There is no response.
    """

    lease: int


class UseBlocks(msgspec.Struct, frozen=True, tag=True):
    """A client's report that it used these blocks of a prompt, so that others are evicted earlier.

    There is no response.
    """

    keys: list[Key]


class PutBlocks(msgspec.Struct, frozen=True, tag=True):
    """A client's message that it has blocks to save: their keys, and their lengths in bytes.

    The response is Wanted.
    """

    keys: list[Key]
    lengths: list[int]


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """The store's response to PutBlocks: which of these blocks the client must send now.

    The blocks are indexes into the list of keys.
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
    """Decode the length of the next message to or from the KV store.

    Raises StoreProtocolError if it is out of range.
    """
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
            raise StoreProtocolError("each key of a message needs one length of at least 0")
    elif isinstance(message, AcquireBlocks):
        most = MAX_LEASE_KEYS
    keys = getattr(message, "keys", [])
    if len(keys) > most:
        raise StoreProtocolError(f"a message has {len(keys)} keys; the limit is {most}")
    if not are_keys(keys):
        raise StoreProtocolError(f"each key of a message must have {KEY_BYTES} bytes")
