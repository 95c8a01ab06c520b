# cython: boundscheck=False, wraparound=False
"""Loops over the block keys of one prompt. If compiled, they create no object per key.

A prompt of 100,000 tokens has 800 keys. tools/compile/declarations.py has the types of the loops.
"""

from __future__ import annotations

from array import array

from policies.prefix.sampled_keys import Keys

MASK = 0xFFFFFFFFFFFFFFFF


def find_last_counted(keys: Keys, counts: array[int], end: int) -> int:
    """Return the greatest index below `end` whose key has two nonzero counts; -1: there is none.

    count_places() returns where in `counts` the two counts of a key are. The array `counts` has the
    type code "I", and its length is a power of two. `end` is at most the number of keys.
    """
    mask = len(counts) - 1
    index = end - 1
    while index >= 0 and not (counts[keys[index] & mask] and counts[keys[index] >> 32 & mask]):
        index -= 1
    return index


def count_places(key: int, length: int) -> tuple[int, int]:
    """Return the indices of a key's two counts in a table of `length` counts, a power of two."""
    return key & length - 1, key >> 32 & length - 1


def scramble_keys(keys: Keys, step: int, offset: int, factor: int) -> Keys:
    """Return a 48-bit number for every `step`-th key. Equal keys have equal numbers.

    The number is the upper part of (key ^ offset) * factor modulo 2**64, with an odd `factor`. So
    different keys rarely have the same number.
    """
    scrambled = array("Q", bytes(8 * (len(keys) // step)))
    scramble_into(scrambled, keys, step, offset, factor)
    return scrambled


def scramble_into(scrambled: Keys, keys: Keys, step: int, offset: int, factor: int) -> None:
    """Compute the numbers of scramble_keys() and store them in `scrambled`."""
    for index in range(len(scrambled)):
        key = keys[(index + 1) * step - 1]
        scrambled[index] = ((key ^ offset) * factor & MASK) >> 16
