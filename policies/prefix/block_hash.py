"""Hashes prompt bytes to block keys, word by word.

In compiled builds, the loop is in C (_block_hash.c), and faster than numpy. Otherwise numpy_hash.py
is used, which computes the same keys. fingerprint.py explains the secret numbers.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from policies.prefix.sampled_keys import Keys

MASK = 0xFFFFFFFFFFFFFFFF


class KeyArithmetic(Protocol):
    """The interface of a class that hashes a prompt block by block.

    The key of a block depends on all blocks before it, so equal keys mean equal beginnings. A word
    is 8 bytes. The class Fingerprinter, which calls this, explains the steps of the hash.

    word_keys      one secret odd number for each word of a block
    position_keys  one secret number for each position of a block in the prompt
    fold           secret number for the first step of the hash
    mix            secret number for its third step
    """

    def __init__(self, word_keys: Keys, position_keys: Keys, fold: int, mix: int) -> None: ...

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> Keys:
        """Return the 64-bit keys of the first `blocks` blocks of the data, as an array of type "Q".

        `seed` is the start value of the chain.
        """
        ...


class ScalarArithmetic:
    """Computes block keys by hashing one word after another.

    It is fast with the loop in C, and about 100 times slower without.
    """

    __slots__ = ("_fold", "_mix", "_position_keys", "_word_keys")

    def __init__(self, word_keys: Keys, position_keys: Keys, fold: int, mix: int) -> None:
        self._word_keys, self._position_keys = word_keys, position_keys
        self._fold, self._mix = fold, mix

    def chain_keys(self, seed: int, data: bytes | memoryview, blocks: int) -> Keys:
        keys = array("Q", bytes(8 * blocks))
        chain_words(data, self._word_keys, self._position_keys, self._fold, self._mix, seed, keys)
        return keys


def chain_words_in_python(
    data: bytes | memoryview,
    word_keys: Keys,
    position_keys: Keys,
    fold: int,
    mix: int,
    key: int,
    keys: Keys,
    /,
) -> None:
    """Hash a prompt block by block, and store the 64-bit key of each block in `keys`.

    The key of a block depends on all blocks before it. The class Fingerprinter explains the hash.

    data           the prompt, of at least as many blocks as `keys` has numbers
    word_keys      one secret odd number for each word of a block
    position_keys  one secret number for each position of a block in the prompt
    fold           secret number for the first step of the hash
    mix            secret number for its third step
    key            the number with which the chain begins
    keys           array for the results, one per block
    """
    words = memoryview(data)[: 8 * len(word_keys) * len(keys)].cast("Q")
    index = 0
    for block in range(len(keys)):
        total = 0
        for column in range(len(word_keys)):
            word = words[index] * fold & MASK
            total = total + (word ^ word >> 32) * word_keys[column] & MASK
            index += 1
        total = total + position_keys[block] & MASK
        key = key + (total ^ total >> 32) * mix & MASK
        keys[block] = key


try:
    from policies.prefix._block_hash import chain_words
except ImportError:
    chain_words = chain_words_in_python


def is_loop_in_c() -> bool:
    return chain_words is not chain_words_in_python
