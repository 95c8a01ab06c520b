"""Decodes the KV events that vLLM and SGLang publish, from bytes to values. No I/O.

A message is a batch of events in MessagePack: `[time, events, data-parallel rank]`. An event has
one of two forms:

- a map with a member `type` (vLLM 0.24 and newer, SGLang 0.5)
- an array that begins with the type (older engines)

Only the schemas below are decoded; no code is ever loaded from a message.
"""

from __future__ import annotations

from typing import Any

import msgspec

from policies.prefix.cached_blocks import CPU, GPU, OTHER, EngineHash

MAX_BATCH_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a batch that is decoded. An engine publishes one batch per step, of a few
kilobytes."""

_HASHES = list[int | bytes]
_MEDIA = {"GPU": GPU, "CPU": CPU, "CPU_PINNED": CPU}
_FULL_ATTENTION = ("full", "mla")
_ARRAYS = (*range(0x90, 0xA0), 0xDC, 0xDD)  # first bytes of arrays in MessagePack


class EventError(Exception):
    """Raised for a message that is not a batch of KV events; the message gives the reason."""


class _StoredFields(msgspec.Struct, frozen=True):
    block_hashes: _HASHES
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedFields(msgspec.Struct, frozen=True):
    block_hashes: _HASHES
    medium: str | None = None
    group_idx: int | None = None


class _StoredMap(_StoredFields, frozen=True, tag="BlockStored"):
    # An event about stored blocks, encoded as a map. SGLang has a separate field for the cache
    # salt.

    cache_salt: str | None = None


class _RemovedMap(_RemovedFields, frozen=True, tag="BlockRemoved"):
    """The KV event `BlockRemoved` in its map form (vLLM 0.24 and newer, SGLang 0.5)."""


class _ClearedMap(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The KV event `AllBlocksCleared` in its map form (vLLM 0.24 and newer, SGLang 0.5)."""


class _StoredArray(_StoredFields, frozen=True, array_like=True, tag="BlockStored"):
    """The KV event `BlockStored` in its array form (older engines)."""


class _RemovedArray(_RemovedFields, frozen=True, array_like=True, tag="BlockRemoved"):
    """The KV event `BlockRemoved` in its array form (older engines)."""


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """The KV event `AllBlocksCleared` in its array form (older engines)."""


_AnyMap = _StoredMap | _RemovedMap | _ClearedMap
_AnyArray = _StoredArray | _RemovedArray | _ClearedArray


class _MapBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[_AnyMap]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[_AnyArray]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class StoredBlocks(msgspec.Struct, frozen=True):
    """A KV event: consecutive blocks of a prompt are now cached.

    names         the engine's hashes of the blocks
    parent        the hash of the block before the first one; None if the prompt begins here
    tokens        token ids of all blocks; may be empty
    block_tokens  number of tokens per block
    medium        bit of the storage medium (policies/prefix/cached_blocks.py)
    lora_name     name of the LoRA adapter; "" for the base model
    salt          the cache salt of a prompt that begins here; "" for none
    further_keys  per block, what else identifies it, such as images; None for most events
    group         number of the group of layers that the blocks belong to; None if the model has one
                  group
    """

    names: list[EngineHash]
    parent: EngineHash | None
    tokens: list[int]
    block_tokens: int
    medium: int
    lora_name: str
    salt: str
    further_keys: tuple[bytes, ...] | None
    group: int | None
    is_full_attention: bool


class RemovedBlocks(msgspec.Struct, frozen=True):
    """A KV event: blocks were removed from a storage medium, such as GPU memory.

    The attributes have the same meaning as in StoredBlocks.
    """

    names: list[EngineHash]
    medium: int
    group: int | None


class ClearedCache(msgspec.Struct, frozen=True):
    """A KV event: the engine has emptied its prefix cache."""


KvEvent = StoredBlocks | RemovedBlocks | ClearedCache


class Batch(msgspec.Struct, frozen=True):
    """One message of KV events from one engine rank.

    published_at  when the engine sent it, in seconds of the engine's clock
    events        its events, in order
    rank          the data-parallel rank that sent it; None if the engine has one rank
    """

    published_at: float
    events: list[KvEvent]
    rank: int | None


_decode_maps = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_arrays = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_raw = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_map = msgspec.msgpack.Decoder(_AnyMap).decode
_decode_array = msgspec.msgpack.Decoder(_AnyArray).decode
_decode_any = msgspec.msgpack.Decoder().decode
_KNOWN_TYPES = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))


def decode_batch(payload: bytes) -> Batch:
    """Decode a message of KV events. Events of unknown types are left out.

    Raises EventError if the message is too long or malformed, or has an event that cannot be used.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise EventError(
            f"the batch of KV events has {len(payload)} bytes; at most {MAX_BATCH_BYTES} are "
            "accepted"
        )
    batch: _MapBatch | _ArrayBatch
    try:
        try:
            batch = _decode_maps(payload)
        except msgspec.ValidationError:
            batch = _decode_arrays(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_slowly(payload)
    return Batch(batch.ts, [_convert(event) for event in batch.events], batch.data_parallel_rank)


def _decode_slowly(payload: bytes) -> Batch:
    # Decode event by event, leaving out those of unknown types. Raises EventError.
    try:
        raw = _decode_raw(payload)
        events: list[KvEvent] = []
        for part in raw.events:
            data = bytes(part)
            is_array = data[0] in _ARRAYS
            value = _decode_any(data)
            kind = value[0] if is_array and value else None if is_array else value.get("type")
            if kind in _KNOWN_TYPES:
                events.append(_convert(_decode_array(data) if is_array else _decode_map(data)))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise EventError(f"the message is not a valid batch of KV events: {error}") from None
    return Batch(raw.ts, events, raw.data_parallel_rank)


def _convert(event: _AnyMap | _AnyArray) -> KvEvent:
    if isinstance(event, _StoredFields):
        return _convert_stored(event)
    if isinstance(event, _RemovedFields):
        return RemovedBlocks(event.block_hashes, _medium(event.medium), event.group_idx)
    return ClearedCache()


def _convert_stored(event: _StoredFields) -> StoredBlocks:
    if event.block_size < 1:
        raise EventError(
            f"a KV event states a block size of {event.block_size} tokens; it must be at least 1"
        )
    lora_name = event.lora_name or ""
    salt = (event.cache_salt if isinstance(event, _StoredMap) else None) or ""
    further: tuple[bytes, ...] | None = None
    if event.extra_keys:
        salt, further = _split_extra_keys(event.extra_keys, lora_name, salt, event)
    return StoredBlocks(
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        _medium(event.medium),
        lora_name,
        salt,
        further,
        event.group_idx,
        event.kv_cache_spec_kind is None or event.kv_cache_spec_kind.startswith(_FULL_ATTENTION),
    )


def _split_extra_keys(
    extra_keys: list[list[Any] | None], lora_name: str, salt: str, event: _StoredFields
) -> tuple[str, tuple[bytes, ...] | None]:
    # Return the cache salt, and what else identifies each block: None if nothing does.
    #
    # vLLM lists the adapter's name with every block, and the salt with the first one of a chain.
    further: list[bytes] = []
    for index, keys in enumerate(extra_keys[: len(event.block_hashes)]):
        left = list(keys or ())
        if lora_name and lora_name in left:
            left.remove(lora_name)
        if not index and event.parent_block_hash is None:
            texts = [key for key in left if isinstance(key, str)]
            if texts:
                salt = salt or texts[-1]
                left.remove(texts[-1])
        further.append(msgspec.msgpack.encode(left) if left else b"")
    further += [b""] * (len(event.block_hashes) - len(further))
    return salt, tuple(further) if any(further) else None


def _medium(name: str | None) -> int:
    return GPU if name is None else _MEDIA.get(name, OTHER)
