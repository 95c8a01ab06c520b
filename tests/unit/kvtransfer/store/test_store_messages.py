"""Tests that a malformed list of keys in a message to a KV store is refused with its fault."""

from __future__ import annotations

import pytest

from kvtransfer.store.store_messages import (
    LENGTH_BYTES,
    MAX_LEASE_KEYS,
    AcquireBlocks,
    CountPrefix,
    PutBlocks,
    StoreProtocolError,
    ToStore,
    decode_request,
    encode,
)

KEY = bytes(32)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (CountPrefix([KEY, b"short"]), "each key of a message must have 32 bytes"),
        (AcquireBlocks([KEY] * (MAX_LEASE_KEYS + 1)), "a message has 1025 keys; the limit is 1024"),
        (PutBlocks([KEY], []), "each key of a message needs one length of at least 0"),
        (PutBlocks([KEY], [-1]), "each key of a message needs one length of at least 0"),
    ],
)
def test_a_message_with_invalid_keys_is_refused(message: ToStore, fault: str) -> None:
    with pytest.raises(StoreProtocolError) as refused:
        decode_request(encode(message)[LENGTH_BYTES:])
    assert str(refused.value) == fault
