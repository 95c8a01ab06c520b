"""Represents prompts as chains of block hashes (keys): prompts with equal prefixes have equal keys.

This module hashes bytes to keys with a secret. prefix_index.py records which endpoint has which
block cached. The gateway chooses what is hashed: tools, template arguments and messages are the
prompt; tenant, model and LoRA adapter are the salt.
"""

from __future__ import annotations

import hashlib
import sys
from array import array

from policies.prefix import block_hash
from policies.prefix.sampled_keys import MAX_BLOCKS, Keys, sample_keys

_MAX_SEEDS = 1024
_NO_KEYS: Keys = array("Q")


class Fingerprint:
    """The fingerprint of one prompt: its chained block keys.

    keys          uint64 array with one key per whole block; keys[i] is a hash of all bytes from the
                  first one to the end of block i
    sampled_keys  the keys that an index stores (sampled_keys.py)
    block_bytes   bytes per block
    n_bytes       bytes of the prompt, including the last partial block, which has no key
    """

    __slots__ = ("block_bytes", "keys", "n_bytes", "sampled_keys")

    def __init__(self, keys: Keys, block_bytes: int, n_bytes: int) -> None:
        self.keys = keys
        self.sampled_keys = sample_keys(keys)
        self.block_bytes = block_bytes
        self.n_bytes = n_bytes

    def __repr__(self) -> str:
        return f"Fingerprint({len(self.keys)} blocks of {self.block_bytes}, {self.n_bytes} bytes)"


class Fingerprinter:
    """Computes fingerprints with one secret. A process has one object, which is not thread-safe.

    The hash has four steps (all modulo 2**64, all over whole arrays):

    1. Fold. Every 8-byte word is multiplied by a secret odd number, and its upper half is xored
       into its lower half. Both operations are invertible, so different words stay different.
       Differences in the top bits only, such as upper and lower case, reach the lower half. Step 2
       needs that: a product modulo 2**64 loses as many bits as its other factor has trailing zeros.
    2. Sum. A block's hash is the sum of its words, each times its own secret odd number
       (multilinear hashing, Carter & Wegman 1979; Lemire & Kaser 2014). For random secrets, two
       given blocks have the same hash with a probability near 2**-63, and below about 2**-31 for
       any pattern.
    3. Mix. A secret number for the block's position is added, because reordered blocks are another
       prompt. Then the halves are xored and multiplied once more, so that hashes do not add up like
       words.
    4. Chain. keys[i] is the sum of the mixed hashes 0..i plus a number derived from the salt. Two
       prompts that are equal up to block i have equal keys up to i. From the first different block
       on, all keys differ. numpy computes all sums at once.

    Without a secret, a client could craft two prompts with the same key. The router would then
    believe that an endpoint has cached a prompt which it has not ("index poisoning"). But the index
    is only a hint: a wrong hint costs a slower first token, never a wrong answer.

    `secret` has at least 16 random bytes. Processes that share an index must have the same secret.
    Raises ValueError if the secret is shorter, or the block size is invalid.
    """

    __slots__ = ("_arithmetic", "_salt_key", "_seeds", "block_bytes")

    def __init__(self, secret: bytes, block_bytes: int = 512) -> None:
        if len(secret) < 16:
            raise ValueError(f"a fingerprint secret must have at least 16 bytes, not {len(secret)}")
        if block_bytes < 8 or block_bytes % 8:
            raise ValueError(f"block_bytes must be a positive multiple of 8, not {block_bytes}")
        self.block_bytes = block_bytes
        self._salt_key = hashlib.blake2b(secret, person=b"penstock-salt").digest()
        words = block_bytes // 8
        numbers = _secret_numbers(secret, words + MAX_BLOCKS + 2)
        word_keys = array("Q", [number | 1 for number in numbers[:words]])
        position_keys = numbers[words : words + MAX_BLOCKS]
        arithmetic = default_arithmetic()
        self._arithmetic = arithmetic(word_keys, position_keys, numbers[-2] | 1, numbers[-1] | 1)
        self._seeds: dict[bytes, int] = {}

    def fingerprint(self, salt: bytes, *parts: bytes | memoryview) -> Fingerprint:
        """Return the fingerprint of a prompt under a salt. The prompt is the concatenation of
        `parts`.

        The boundaries between parts do not matter.
        """
        return self._chain(salt, parts[0] if len(parts) == 1 else b"".join(parts))

    def _seed(self, salt: bytes) -> int:
        # Return the number with which the chains of this salt begin, from a cache if possible.
        seed = self._seeds.get(salt)
        if seed is None:
            digest = hashlib.blake2b(
                salt, digest_size=8, key=self._salt_key, person=b"text"
            ).digest()
            if len(self._seeds) >= _MAX_SEEDS:
                self._seeds.clear()
            seed = self._seeds[salt] = int.from_bytes(digest, "little")
        return seed

    def _chain(self, salt: bytes, data: bytes | memoryview) -> Fingerprint:
        length = len(data)
        blocks = length // self.block_bytes
        if blocks > MAX_BLOCKS:
            blocks = MAX_BLOCKS
        keys = _NO_KEYS
        if blocks:
            keys = self._arithmetic.chain_keys(self._seed(salt), data, blocks)
        return Fingerprint(keys, self.block_bytes, length)


def default_arithmetic() -> type[block_hash.KeyArithmetic]:
    """Return the fastest available code that hashes prompts: compiled, numpy, or plain Python."""
    if block_hash.is_loop_in_c():
        return block_hash.ScalarArithmetic
    try:
        from policies.prefix.numpy_hash import NumpyArithmetic
    except ModuleNotFoundError:  # numpy belongs to the extra `demo`
        return block_hash.ScalarArithmetic
    return NumpyArithmetic


def is_hashing_slow() -> bool:
    """Return whether prompts are hashed in plain Python, which takes up to 100 times as long as
    numpy.
    """
    return not block_hash.is_loop_in_c() and (default_arithmetic() is block_hash.ScalarArithmetic)


def _secret_numbers(secret: bytes, count: int) -> Keys:
    numbers = array("Q", hashlib.shake_256(b"penstock-fingerprint" + secret).digest(8 * count))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
