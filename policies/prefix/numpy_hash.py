"""Hashes prompt bytes to block keys with numpy, if the modules are not compiled.

The keys are equal to those of block_hash.py.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from policies.prefix.sampled_keys import Keys

Numbers = npt.NDArray[np.uint64]

_SLAB_BLOCKS = 256
_FEW_BLOCKS = 64  # up to this size a plain product is cheaper than einsum
_MOST_SEEDS = 64  # kept as arrays, which numpy adds in half the time of a scalar
_HALF = np.array(32, np.uint64)  # zero-dimensional arrays are faster for numpy than scalars


class NumpyArithmetic:
    """Computes block keys with numpy.

    Each step of the hash processes all words of the prompt at once.
    """

    __slots__ = ("_fold", "_folded", "_mix", "_position_keys", "_seeds", "_upper", "_word_keys")

    def __init__(self, word_keys: Keys, position_keys: Keys, fold: int, mix: int) -> None:
        self._word_keys = np.frombuffer(word_keys, np.uint64)
        self._position_keys = np.frombuffer(position_keys, np.uint64)
        self._fold, self._mix = np.array(fold, np.uint64), np.array(mix, np.uint64)
        self._seeds: dict[int, Numbers] = {}
        self._folded, self._upper = np.empty((2, _SLAB_BLOCKS, len(word_keys)), np.uint64)

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> Keys:
        words = len(self._word_keys)
        keys = self._block_hashes(
            np.frombuffer(data, np.uint64, blocks * words).reshape(blocks, words)
        )
        np.add(keys, self._position_keys[:blocks], keys)
        np.bitwise_xor(keys, np.right_shift(keys, _HALF), keys)
        np.multiply(keys, self._mix, keys)
        np.add.accumulate(keys, 0, None, keys)
        start = self._seeds.get(seed)
        if start is None:
            if len(self._seeds) >= _MOST_SEEDS:
                self._seeds.clear()
            start = self._seeds[seed] = np.array(seed, np.uint64)
        np.add(keys, start, keys)
        return array("Q", keys.tobytes())

    def _block_hashes(self, words: Numbers) -> Numbers:
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
