"""Selects the block keys of a prompt that a prefix index stores and gateways exchange.

A key covers everything before it, so some keys of a chain suffice. Each of the first 256 blocks has
an entry, then every second block up to 512, every fourth up to 1024, and so on. A matched length is
thus too short by less than 1/128, and long prompts need about half of the entries. fingerprint.py
computes the keys.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from typing import TypeAlias

Keys: TypeAlias = "array[int]"
"""An array of unsigned 64-bit block keys (type code "Q").

A key becomes a Python int only when it is read.
"""

MAX_BLOCKS = 16_384
"""Maximum number of blocks of a prompt for which keys are computed.

It bounds the work per request: 8 MiB of prompt at the default block size.
"""

_FINE_BLOCKS = 256


def sample_keys(chain: Keys) -> Keys:
    """Select block keys of a prompt that suffice to recognise its prefixes, shortest prefix first.

    Each key covers everything before it. All keys of the first blocks are selected, and fewer of
    later ones.
    """
    if len(chain) <= _FINE_BLOCKS:
        return chain
    sampled, covered, stride = chain[:_FINE_BLOCKS], _FINE_BLOCKS, 2
    while covered < len(chain):
        sampled += chain[covered + stride - 1 : 2 * covered : stride]
        covered, stride = 2 * covered, 2 * stride
    return sampled


SAMPLE_LENGTHS = sample_keys(array("Q", range(1, MAX_BLOCKS + 1))).tolist()
"""Length of a prefix, in blocks, by the number of its sampled key. Lengths ascend."""


def pack(keys: Keys) -> bytes:
    """Return sampled block keys as bytes, each as an unsigned 64-bit little-endian integer."""
    return _to_little_endian(keys).tobytes()


def unpack(keys: bytes, blocks: int, block_bytes: int, n_bytes: int) -> Keys:
    """Parse serialized sampled keys for `PrefixIndex.insert_keys`.

    keys         the bytes that `pack` returned
    blocks       number of blocks of the whole prompt
    block_bytes  bytes of each block
    n_bytes      bytes of the prompt

    Raises ValueError if the numbers do not match, so that no corrupt entry gets into an index.
    """
    if not 0 < blocks <= MAX_BLOCKS or not blocks * block_bytes <= n_bytes < 1 << 40:
        raise ValueError(
            f"a prompt of {n_bytes} bytes cannot have {blocks} blocks of {block_bytes} bytes"
        )
    count = bisect_right(SAMPLE_LENGTHS, blocks)
    if len(keys) != 8 * count:
        raise ValueError(
            f"{blocks} blocks have {count} sampled keys of 8 bytes each, but got {len(keys)} bytes"
        )
    return _to_little_endian(array("Q", keys))


def _to_little_endian(keys: Keys) -> Keys:
    if sys.byteorder == "big":
        keys = keys[:]
        keys.byteswap()
    return keys
