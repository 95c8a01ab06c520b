"""Computes fingerprints (block hashes) of prompts that a trace contains only as block ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from policies.prefix.fingerprint import Fingerprint


def fingerprint_of_chain(
    ids: Sequence[int], block_bytes: int, n_bytes: int, salt: int = 0
) -> Fingerprint:
    """Build the fingerprint (block hashes) of a prompt for which a trace has only block ids.

    ids          the ids of the prompt's whole blocks
    block_bytes  bytes per block
    n_bytes      bytes of the prompt
    salt         added to every id, so that prompts with different salts have different keys

    Keys are the ids mixed over 64 bits (splitmix64's finalizer), because the index distributes its
    entries by low bits. Do not use this for prompts of clients: the hash has no secret, so a client
    could predict keys.
    """
    if not ids:  # a log without block ids
        return Fingerprint(array("Q"), block_bytes, n_bytes)
    keys = np.array(ids, np.uint64)
    keys += np.uint64(salt & 0xFFFFFFFFFFFFFFFF)
    for shift, odd in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(odd)
    keys ^= keys >> np.uint64(31)
    return Fingerprint(array("Q", keys.tobytes()), block_bytes, n_bytes)
