"""Tests of decoding the KV events (reports of cached blocks) of vLLM and SGLang."""

from __future__ import annotations

import msgpack
import pytest

from gateway.fleet.kv_events.event_decoder import (
    ClearedCache,
    EventError,
    RemovedBlocks,
    StoredBlocks,
    decode_batch,
)
from policies.prefix.cached_blocks import CPU, GPU, OTHER

MAPS = bytes.fromhex(
    "93cb3ff80000000000009389a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172"
    "656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f"
    "6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964780083a474797065ac426c6f636b"
    "52656d6f766564ac626c6f636b5f6861736865739107a66d656469756da347505581a474797065b0416c6c426c6f636b"
    "73436c656172656400"
)
ARRAYS = bytes.fromhex(
    "93cb3ff80000000000009398ab426c6f636b53746f7265649107c0940102030404c0a3475055c093ac426c6f636b5265"
    "6d6f7665649107a347505591b0416c6c426c6f636b73436c656172656400"
)


def stored(**members: object) -> StoredBlocks:
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
    }
    (found,) = decode_batch(msgpack.packb([1.0, [event | members], 0])).events
    assert isinstance(found, StoredBlocks)
    return found


@pytest.mark.parametrize("payload", [MAPS, ARRAYS])
def test_maps_and_arrays_of_vllm_mean_the_same(payload: bytes) -> None:
    batch = decode_batch(payload)
    first, second, third = batch.events
    assert isinstance(first, StoredBlocks)
    assert (first.names, first.parent, first.tokens) == ([7], None, [1, 2, 3, 4])
    assert (first.block_tokens, first.medium) == (4, GPU)
    assert isinstance(second, RemovedBlocks)
    assert (second.names, second.medium) == ([7], GPU)
    assert isinstance(third, ClearedCache)
    assert (batch.published_at, batch.rank) == (1.5, 0)


@pytest.mark.parametrize(
    ("name", "medium"),
    [
        ("GPU", GPU),
        (None, GPU),
        ("CPU", CPU),
        ("CPU_PINNED", CPU),
        ("DISK", OTHER),
        ("STORAGE", OTHER),
    ],
)
def test_media_of_both_engines_are_known(name: str | None, medium: int) -> None:
    assert stored(medium=name).medium == medium


def test_hashes_may_be_signed_unsigned_or_bytes() -> None:
    names = [-5, (1 << 64) - 1]
    assert stored(block_hashes=names).names == names
    assert stored(block_hashes=[b"a" * 32, b"b" * 32]).names == [b"a" * 32, b"b" * 32]


def test_the_cache_salt_is_the_last_text_of_the_first_blocks_extra_keys() -> None:
    found = stored(lora_name="tuned", extra_keys=[["tuned", "tenant-a"], ["tuned"]])
    assert (found.lora_name, found.salt, found.further_keys) == ("tuned", "tenant-a", None)


def test_the_cache_salt_of_sglang_is_a_member() -> None:
    assert stored(cache_salt="tenant-a").salt == "tenant-a"


def test_images_are_further_keys_of_their_blocks() -> None:
    found = stored(extra_keys=[None, [["image-hash", 3]]])
    assert found.salt == ""
    assert found.further_keys is not None
    assert (found.further_keys[0], bool(found.further_keys[1])) == (b"", True)


def test_unknown_members_and_unknown_types_are_left_out() -> None:
    events = [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": [1], "ownership": "shared"},
        ["BlockRemoved", [2], "GPU", 0, "LOCAL"],
    ]
    names = [event.names for event in decode_batch(msgpack.packb([1.0, events, None])).events]
    assert names == [[1], [2]]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb({"events": []}),
        msgpack.packb([1.0, [{"type": "BlockStored"}]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [[1, 2]], 1]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [], 0]]]),
        msgpack.packb([1.0, [3]]),
        msgpack.packb([1.0, [[]]]),
        msgpack.packb([1.0, [["BlockRemoved", [1], "GPU"]]]).replace(b"GPU", b"G\x80U"),
    ],
)
def test_anything_else_is_an_error_and_no_crash(payload: bytes) -> None:
    if payload == msgpack.packb([1.0, [[]]]):
        assert decode_batch(payload).events == []
        return
    with pytest.raises(EventError):
        decode_batch(payload)
