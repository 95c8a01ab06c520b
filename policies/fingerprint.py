"""Fingerprint: a prompt as a chain of block keys, so that equal beginnings give equal keys.

Lives here: the keyed arithmetic from bytes to keys. Not here: who holds which block (prefix_index.py),
or what counts as the prompt and what as the salt (the gateway decides: tools, template arguments and messages are
parts; tenant, model and LoRA are salt).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np

from policies import fold
from policies.rungs import MAX_BLOCKS, Keys, rungs

_SEEDS_KEPT = 1024


class Fingerprint:
    """The block keys of one prompt.

    keys         uint64, one per whole block; keys[i] stands for everything from the first byte to the end of block i
    rungs        those of them that an index has entries for (rungs.py)
    block_bytes  bytes per block
    n_bytes      bytes of the prompt, the ragged end included (it has no key)
    """

    __slots__ = ("block_bytes", "keys", "n_bytes", "rungs")

    def __init__(self, keys: Keys, block_bytes: int, n_bytes: int) -> None:
        self.keys = keys
        self.rungs = rungs(keys)
        self.block_bytes = block_bytes
        self.n_bytes = n_bytes

    def __repr__(self) -> str:
        return f"Fingerprint({len(self.keys)} blocks of {self.block_bytes}, {self.n_bytes} bytes)"


class Fingerprinter:
    """Turns prompts into fingerprints under one secret. One per process; not to be shared between threads.

    The arithmetic, from the inside out (all modulo 2**64, all over whole arrays):

    1. Fold. Every 8-byte word is multiplied by a secret odd number and its upper half is xored onto its lower half.
       Both steps can be undone, so different words stay different; afterwards a difference that sat only in the top
       bits (the case of one letter) has reached the lower half. Step 2 needs that: a product modulo 2**64 loses as
       many bits of the key as its other factor has trailing zeros.
    2. Sum. A block's hash is the sum of its words, each times a secret odd number of its own (multilinear hashing,
       Carter & Wegman 1979; Lemire & Kaser 2014). Two different blocks given beforehand agree with a probability
       near 2**-63, and whatever their pattern, below about 2**-31, over the choice of the secret.
    3. Mix. A secret number for the block's place is added (blocks in another order are another prompt), the halves
       are xored and multiplied once more, so that hashes no longer add up the way words do.
    4. Chain. keys[i] is the sum of the mixed hashes 0..i plus a number drawn from the salt. A sum that only grows at
       its end is a prefix law: two prompts equal up to block i have equal keys up to i, and from the first block
       that differs on, every key differs. numpy does all sums at once.

    Why keyed: a client who could predict keys could craft two prompts with one key and make the router believe that
    an endpoint holds what it does not ("index poisoning"). The index stays advisory all the same: a wrong belief
    costs a slower first token, never a wrong answer.

    `secret` is at least 16 random bytes, drawn anew by every process that does not share its index.
    """

    __slots__ = ("_arithmetic", "_salt_key", "_seeds", "block_bytes")

    def __init__(self, secret: bytes, block_bytes: int = 512) -> None:
        if len(secret) < 16:
            raise ValueError(f"a fingerprint secret has at least 16 bytes, not {len(secret)}")
        if block_bytes < 8 or block_bytes % 8:
            raise ValueError(f"block_bytes is a positive multiple of 8, not {block_bytes}")
        self.block_bytes = block_bytes
        self._salt_key = hashlib.blake2b(secret, person=b"penstock-salt").digest()
        words = block_bytes // 8
        numbers = _secret_numbers(secret, words + MAX_BLOCKS + 2)
        word_keys, places = numbers[:words] | np.uint64(1), numbers[words : words + MAX_BLOCKS]
        self._arithmetic = fold.BEST(word_keys, places, int(numbers[-2]) | 1, int(numbers[-1]) | 1)
        self._seeds: dict[bytes, int] = {}

    def of(self, salt: bytes, *parts: bytes | memoryview) -> Fingerprint:
        """The fingerprint of the parts laid end to end; where one part ends and the next begins does not matter.

        One contiguous part is read in place; several are joined once.
        """
        return self._chain(self._seed(salt), parts[0] if len(parts) == 1 else b"".join(parts))

    def _seed(self, salt: bytes) -> int:
        """The number a chain begins with; remembered, for tenants and models are few and come again."""
        seed = self._seeds.get(salt)
        if seed is None:
            digest = hashlib.blake2b(salt, digest_size=8, key=self._salt_key, person=b"text").digest()
            if len(self._seeds) >= _SEEDS_KEPT:
                self._seeds.clear()
            seed = self._seeds[salt] = int.from_bytes(digest, "little")
        return seed

    def _chain(self, seed: int, data: bytes | memoryview) -> Fingerprint:
        blocks = min(len(data) // self.block_bytes, MAX_BLOCKS)
        keys = self._arithmetic.chained(seed, data, blocks) if blocks else array("Q")
        return Fingerprint(keys, self.block_bytes, len(data))


def _secret_numbers(secret: bytes, count: int) -> fold.Numbers:
    """`count` independent 64-bit numbers stretched from the secret."""
    stretched = hashlib.shake_256(b"penstock-fingerprint" + secret).digest(8 * count)
    return np.frombuffer(stretched, np.dtype("<u8")).astype(np.uint64)


def of_chain(ids: Sequence[int], block_bytes: int, n_bytes: int, salt: int = 0) -> Fingerprint:
    """The fingerprint of a prompt of which only the chained ids of its whole blocks are known, as in recorded traffic.

    Keys are the ids spread over 64 bits (splitmix64's finish), for the index sorts its entries by their low bits. Not
    for prompts of clients: whoever knows the ids knows the keys.
    """
    keys = np.array(ids, np.uint64)
    keys += np.uint64(salt & 0xFFFFFFFFFFFFFFFF)
    for shift, odd in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(odd)
    keys ^= keys >> np.uint64(31)
    return Fingerprint(array("Q", keys.tobytes()), block_bytes, n_bytes)


def ids_of(fingerprint: Fingerprint, bytes_each: int = 2048) -> list[int]:
    """Chained ids of the prompt's blocks of that size (at least the fingerprint's own), for a log: 48 bits of a key.

    They say which prompts of one process begin alike and how far, and nothing else: keys are made under its secret.
    """
    step = max(1, bytes_each // fingerprint.block_bytes)
    return [key >> 16 for key in fingerprint.keys[step - 1 :: step]]
