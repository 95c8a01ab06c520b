# cython: boundscheck=False, wraparound=False
"""The arithmetic of fingerprints, from bytes to block keys, word by word.

Compiled, this short loop is faster than numpy, whose calls run through much code that is cold in
the processor's caches for most requests. Python that is not compiled uses
policies/prefix/numpy_hash.py, which gives the same keys. Secrets are explained in
policies/prefix/fingerprint.py.
"""

from __future__ import annotations

from array import array
from types import FunctionType
from typing import Protocol

from policies.prefix.sampled_keys import Keys

MASK = 0xFFFFFFFFFFFFFFFF


class KeyArithmetic(Protocol):
    """Computes chained keys; its secrets are per word, per block, for folding and mixing."""

    def __init__(self, word_keys: Keys, places: Keys, fold: int, mix: int) -> None: ...

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> Keys:
        """Return the keys ("Q") of the first `blocks` blocks of the data."""
        ...


class ScalarArithmetic:
    """One word after the other: fast when compiled, 100 times slower in Python."""

    __slots__ = ("_fold", "_mix", "_places", "_word_keys")

    def __init__(self, word_keys: Keys, places: Keys, fold: int, mix: int) -> None:
        self._word_keys, self._places = word_keys, places
        self._fold, self._mix = fold, mix

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> Keys:
        words = memoryview(data)[: blocks * 8 * len(self._word_keys)].cast("Q")
        keys = array("Q", bytes(8 * blocks))
        chain_words(words, self._word_keys, self._places, self._fold, self._mix, seed, keys)
        return keys


def chain_words(  # type: ignore[no-untyped-def]
    words, word_keys, places, fold, mix, key, keys
) -> None:
    """Fold, sum, mix and chain (policies/prefix/fingerprint.py) into `keys`, modulo 2**64."""
    index = 0
    for block in range(len(keys)):
        total = 0
        for column in range(len(word_keys)):
            word = words[index] * fold & MASK
            total = total + (word ^ word >> 32) * word_keys[column] & MASK
            index += 1
        total = total + places[block] & MASK
        key = key + (total ^ total >> 32) * mix & MASK
        keys[block] = key


def is_loop_compiled() -> bool:
    """Whether `chain_words` is a C function."""
    return not isinstance(chain_words, FunctionType)
