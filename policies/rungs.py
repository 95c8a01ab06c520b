"""The keys of a chain that a prefix index has entries for: what is looked up, booked, and told other gateways.

Keys are cumulative, so any subset of a chain is a chain. Every one of the first 256 has an entry, every second up to
512, every fourth up to 1024, and so on: a believed length falls short by less than 1/128, and a prompt of 100,000
tokens takes some 450 entries in place of 800. Not here: how keys are made (fingerprint.py).
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from typing import TypeAlias

Keys: TypeAlias = "array[int]"
"""uint64 each ("Q"): they become Python's ints one by one, where they are looked at."""

MAX_BLOCKS = 16_384
"""Blocks fingerprinted at most: 8 MiB of prompt at the default block size. Work per request is bounded by it."""

_FINE_BLOCKS = 256


def rungs(chain: Keys) -> Keys:
    """Those of the chain that have an entry, the shortest first."""
    if len(chain) <= _FINE_BLOCKS:
        return chain
    found, done, stride = chain[:_FINE_BLOCKS], _FINE_BLOCKS, 2
    while done < len(chain):
        found += chain[done + stride - 1 : 2 * done : stride]
        done, stride = 2 * done, 2 * stride
    return found


LENGTHS = rungs(array("Q", range(1, MAX_BLOCKS + 1))).tolist()
"""How many blocks each rung stands for."""


def packed(keys: Keys) -> bytes:
    """A fingerprint's rungs, 8 bytes each, little-endian."""
    return _little(keys).tobytes()


def unpacked(keys: bytes, blocks: int, block_bytes: int, n_bytes: int) -> Keys:
    """The rungs that were packed, as an index takes them (`insert_rungs`). Raises ValueError when the numbers do not
    belong together, so that nothing odd gets into an index."""
    if not 0 < blocks <= MAX_BLOCKS or not blocks * block_bytes <= n_bytes < 1 << 40:
        raise ValueError(f"{blocks} blocks of {block_bytes} bytes are no chain of {n_bytes} bytes")
    count = bisect_right(LENGTHS, blocks)
    if len(keys) != 8 * count:
        raise ValueError(f"{len(keys)} bytes are no {count} keys of {blocks} blocks")
    return _little(array("Q", keys))


def _little(keys: Keys) -> Keys:
    """From this machine's byte order to little-endian, or back."""
    if sys.byteorder == "big":
        keys = keys[:]
        keys.byteswap()
    return keys
