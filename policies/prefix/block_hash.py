# cython: boundscheck=False, wraparound=False
"""The arithmetic of fingerprints, from bytes to block keys: once with numpy, once word by word.

Both give the same keys. numpy is fast in pure Python, but its calls run through much code, which is
cold in the processor's caches for most requests. The compiled gateway therefore uses the short word
loop. Secrets are explained in policies/prefix/fingerprint.py.
"""

from __future__ import annotations

from array import array
from types import FunctionType
from typing import Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]

MASK = 0xFFFFFFFFFFFFFFFF

_SLAB_BLOCKS = 256
_FEW_BLOCKS = 64  # up to this size a plain product is cheaper than einsum
_HALF = np.array(32, np.uint64)  # zero-dimensional arrays are faster for numpy than scalars


class KeyArithmetic(Protocol):
    """Computes chained keys; its secrets are per word, per block, for folding and mixing."""

    def __init__(self, word_keys: Numbers, places: Numbers, fold: int, mix: int) -> None: ...

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> array[int]:
        """Return the keys ("Q") of the first `blocks` blocks of the data."""
        ...


class NumpyArithmetic:
    """Each step runs over all words or all blocks at once."""

    __slots__ = ("_fold", "_folded", "_mix", "_places", "_upper", "_word_keys")

    def __init__(self, word_keys: Numbers, places: Numbers, fold: int, mix: int) -> None:
        self._word_keys, self._places = word_keys, places
        self._fold, self._mix = np.array(fold, np.uint64), np.array(mix, np.uint64)
        self._folded, self._upper = np.empty((2, _SLAB_BLOCKS, len(word_keys)), np.uint64)

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> array[int]:
        words = len(self._word_keys)
        keys = self._block_hashes(
            np.frombuffer(data, np.uint64, blocks * words).reshape(blocks, words)
        )
        np.add(keys, self._places[:blocks], keys)
        np.bitwise_xor(keys, np.right_shift(keys, _HALF), keys)
        np.multiply(keys, self._mix, keys)
        np.add.accumulate(keys, 0, None, keys)
        np.add(keys, np.uint64(seed), keys)
        return array("Q", keys.tobytes())

    def _block_hashes(self, words: Numbers) -> Numbers:
        """Fold and sum in slabs, so that intermediate arrays stay in the processor's cache."""
        if len(words) <= _SLAB_BLOCKS:
            return self._slab(words)
        return np.concatenate(
            [
                self._slab(words[offset : offset + _SLAB_BLOCKS])
                for offset in range(0, len(words), _SLAB_BLOCKS)
            ]
        )

    def _slab(self, words: Numbers) -> Numbers:
        folded, upper = self._folded[: len(words)], self._upper[: len(words)]
        np.multiply(words, self._fold, folded)
        np.right_shift(folded, _HALF, upper)
        np.bitwise_xor(folded, upper, folded)
        few = len(words) <= _FEW_BLOCKS
        sums: Numbers = (
            folded.dot(self._word_keys) if few else np.einsum("ij,j->i", folded, self._word_keys)
        )
        return sums


class ScalarArithmetic:
    """One word after the other, for the compiled module."""

    __slots__ = ("_fold", "_mix", "_places", "_word_keys")

    def __init__(self, word_keys: Numbers, places: Numbers, fold: int, mix: int) -> None:
        self._word_keys = array("Q", word_keys.tobytes())
        self._places = array("Q", places.tobytes())
        self._fold, self._mix = fold, mix

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> array[int]:
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


DEFAULT_ARITHMETIC: type[KeyArithmetic] = (
    NumpyArithmetic if isinstance(chain_words, FunctionType) else ScalarArithmetic
)
