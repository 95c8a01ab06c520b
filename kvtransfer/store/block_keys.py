"""Computes the keys under which KV blocks are stored: a hash chain over model, tenant and tokens.

A key covers everything that a block's KV depends on, so equal keys mean equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

Key = bytes
"""A key of KEY_BYTES bytes."""

KEY_BYTES = 32
TOKEN_BYTES = 4


def chain_root(compatibility: str, tenant: str) -> Key:
    """Return the key from which the keys of all blocks of one tenant and one model are derived.

    compatibility  text with everything else that the bytes depend on: weights, layout, quantisation
    tenant         the cache salt; blocks of different tenants have different keys
    """
    fields = (compatibility.encode(), tenant.encode())
    sized = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return hashlib.blake2b(sized, digest_size=KEY_BYTES, person=b"kv-store-root").digest()


def block_keys(root: Key, tokens: bytes | memoryview, block_tokens: int) -> list[Key]:
    """Return the keys under which the KV blocks of a prompt are stored, of all full blocks.

    root    the result of chain_root()
    tokens  token identifiers of four bytes each, little-endian

    A key covers all tokens from the beginning of the prompt to the end of its block.
    """
    return list(_chain(root, memoryview(tokens), block_tokens * TOKEN_BYTES))


def rank_keys(keys: Sequence[Key], rank: int) -> list[Key]:
    """Return the keys under which one rank stores its part of each block.

    They are needed if each rank is a process of its own, and stores its part separately.
    """
    salt = rank.to_bytes(4, "little")
    return [
        hashlib.blake2b(key, digest_size=KEY_BYTES, salt=salt, person=b"kv-rank").digest()
        for key in keys
    ]


def _chain(key: Key, tokens: memoryview, size: int) -> Iterator[Key]:
    for start in range(0, len(tokens) - size + 1, size):
        block = tokens[start : start + size]
        key = hashlib.blake2b(block, digest_size=KEY_BYTES, key=key, person=b"kv-block").digest()
        yield key


def are_keys(keys: Sequence[bytes]) -> bool:
    """Return whether all of these byte strings have the length of a key."""
    return all(len(key) == KEY_BYTES for key in keys)
