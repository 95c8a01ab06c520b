"""A fingerprint reduced to the keys that a prefix index reads, for telling another gateway what a prompt was.

An index has entries at a ladder of chain lengths alone, so 180 keys stand for the 800 of a long prompt. Not here: the
ladder (prefix_index.py) and how keys are made (fingerprint.py).
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from policies.fingerprint import MAX_BLOCKS, Fingerprint
from policies.prefix_index import ladder

_LENGTHS = tuple(ladder())
_PLACES = np.array(_LENGTHS) - 1


def packed(fingerprint: Fingerprint) -> bytes:
    """The keys at the ladder's rungs, 8 bytes each, little-endian."""
    rungs = bisect_right(_LENGTHS, len(fingerprint.keys))
    keys: bytes = fingerprint.keys[_PLACES[:rungs]].astype("<u8", copy=False).tobytes()
    return keys


def unpacked(keys: bytes, blocks: int, block_bytes: int, n_bytes: int) -> list[int]:
    """The keys that were packed, as an index takes them (`insert_rungs`). Raises ValueError when the numbers do not
    belong together, so that nothing odd gets into an index."""
    if not 0 < blocks <= MAX_BLOCKS or not blocks * block_bytes <= n_bytes < 1 << 40:
        raise ValueError(f"{blocks} blocks of {block_bytes} bytes are no chain of {n_bytes} bytes")
    rungs = bisect_right(_LENGTHS, blocks)
    if len(keys) != 8 * rungs:
        raise ValueError(f"{len(keys)} bytes are no {rungs} keys of {blocks} blocks")
    found: list[int] = np.frombuffer(keys, "<u8").tolist()
    return found
