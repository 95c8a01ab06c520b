# cython: boundscheck=False, wraparound=False
"""Loops over the block keys of one prompt. If compiled, they create no object per key.

A prompt of 100,000 tokens has 800 keys. tools/compile/declarations.py has the types of the loops.
"""

from __future__ import annotations

from array import array

from policies.prefix.sampled_keys import Keys

MASK = 0xFFFFFFFFFFFFFFFF


def find_last_counted(keys: Keys, counts: array[int], end: int) -> int:
    """Return the greatest index below `end` of a key with two counts other than 0; -1: none.

    The counts of a key are at the places that count_places() returns. The length of `counts` is a
    power of two, its type code "I". `end` is at most the number of keys.
    """
    mask = len(counts) - 1
    index = end - 1
    while index >= 0 and not (counts[keys[index] & mask] and counts[keys[index] >> 32 & mask]):
        index -= 1
    return index


def count_places(key: int, length: int) -> tuple[int, int]:
    """Return at which places of a table of `length` counts the two counts of a key are."""
    return key & length - 1, key >> 32 & length - 1


def scramble_keys(keys: Keys, step: int, offset: int, factor: int) -> Keys:
    """Return a 48-bit number for every `step`-th key, with equal numbers for equal keys only.

    The number is the upper part of (key ^ offset) * factor modulo 2**64. `factor` is odd.
    """
    scrambled = array("Q", bytes(8 * (len(keys) // step)))
    scramble_into(scrambled, keys, step, offset, factor)
    return scrambled


def scramble_into(scrambled: Keys, keys: Keys, step: int, offset: int, factor: int) -> None:
    """Compute the numbers of scramble_keys() and store them in `scrambled`."""
    for index in range(len(scrambled)):
        key = keys[(index + 1) * step - 1]
        scrambled[index] = ((key ^ offset) * factor & MASK) >> 16
