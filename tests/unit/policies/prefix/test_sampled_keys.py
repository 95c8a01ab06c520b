"""Tests that a sample of a prompt's block hashes suffices to fill an index of cached prompts."""

from __future__ import annotations

from random import Random

import pytest

from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.prefix_index import PrefixIndex
from policies.prefix.sampled_keys import pack, unpack

PRINTS = Fingerprinter(b"sixteen bytes at least", block_bytes=64)
CAPACITY_TOKENS = 4_000


def prompt_of(rng: Random, trunk: bytes) -> Fingerprint:
    return PRINTS.fingerprint(
        b"salt", trunk[: rng.randrange(len(trunk))] + rng.randbytes(rng.randrange(64 * 100))
    )


def test_an_index_fed_with_keys_matches_one_fed_with_prompts() -> None:
    rng = Random(1)
    trunks = [rng.randbytes(64 * 200) for _ in range(3)]
    direct, reported = PrefixIndex(1 << 22), PrefixIndex(1 << 22)
    for index in (direct, reported):
        index.set_capacity(0, CAPACITY_TOKENS)
    for _ in range(400):
        prompt, slot = prompt_of(rng, rng.choice(trunks)), rng.randrange(3)
        if not len(prompt.keys):
            continue
        tokens = prompt.n_bytes // 4
        keys = unpack(pack(prompt.sampled_keys), len(prompt.keys), 64, prompt.n_bytes)
        per_block = tokens * 64 / prompt.n_bytes
        if rng.random() < 0.1:
            direct.trim(prompt, slot, tokens // 2, tokens)
            reported.trim_keys(keys, slot, tokens // 2, per_block)
        else:
            direct.insert(prompt, slot, tokens)
            reported.insert_keys(keys, slot, per_block)
        other = prompt_of(rng, rng.choice(trunks))
        if len(other.keys):
            assert direct.match(other, tokens) == reported.match(other, tokens)
    assert direct.stats() == reported.stats()


@pytest.mark.parametrize(
    ("blocks", "n_bytes", "cut"),
    [(0, 640, 0), (10, 639, 0), (10, 1 << 40, 0), (10, 640, 8), (11, 704, 0)],
)
def test_keys_that_are_no_chain_are_refused(blocks: int, n_bytes: int, cut: int) -> None:
    keys = pack(PRINTS.fingerprint(b"salt", bytes(640)).sampled_keys)
    with pytest.raises(ValueError, match=r"cannot have|sampled keys of 8 bytes"):
        unpack(keys[cut:], blocks, 64, n_bytes)
