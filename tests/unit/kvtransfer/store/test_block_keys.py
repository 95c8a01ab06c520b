"""Tests that a stored KV block gets another key if anything differs that changes its bytes."""

from __future__ import annotations

import os

from kvtransfer.store.block_keys import KEY_BYTES, are_keys, block_keys, chain_root, rank_keys

TOKENS = os.urandom(4 * 16 * 3)
ROOT = chain_root("llama/bf16", "tenant-a")


def test_only_full_blocks_have_keys() -> None:
    keys = block_keys(ROOT, TOKENS + b"\0\0\0\0", 16)
    assert len(keys) == 3
    assert are_keys(keys)
    assert not are_keys([*keys, b"short"])
    assert len(keys[0]) == KEY_BYTES
    assert block_keys(ROOT, b"", 16) == []


def test_prompts_share_the_keys_of_their_common_prefix() -> None:
    other = TOKENS[:64] + os.urandom(128)
    keys, others = block_keys(ROOT, TOKENS, 16), block_keys(ROOT, other, 16)
    assert keys[0] == others[0]
    assert not set(keys[1:]) & set(others[1:])


def test_the_same_tokens_later_in_a_prompt_have_another_key() -> None:
    keys = block_keys(ROOT, TOKENS[:64] * 3, 16)
    assert len(set(keys)) == 3


def test_tenants_and_incompatible_caches_have_no_key_in_common() -> None:
    roots = [
        ROOT,
        chain_root("llama/bf16", "tenant-b"),
        chain_root("llama/fp8", "tenant-a"),
        # The border between the two fields counts.
        chain_root("llama/bf16t", "enant-a"),
    ]
    keys = [key for root in roots for key in block_keys(root, TOKENS, 16)]
    assert len(set(keys)) == len(keys)


def test_each_rank_has_keys_of_its_own() -> None:
    keys = block_keys(ROOT, TOKENS, 16)
    found = [rank_keys(keys, rank) for rank in range(4)]
    assert all(are_keys(each) for each in found)
    assert len({key for each in (keys, *found) for key in each}) == 5 * len(keys)


def test_a_chain_goes_on_from_its_last_key() -> None:
    first = block_keys(ROOT, TOKENS[:64], 16)
    assert first + block_keys(first[-1], TOKENS[64:], 16) == block_keys(ROOT, TOKENS, 16)
