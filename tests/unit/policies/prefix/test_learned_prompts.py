"""Tests of remembering which tokens a prompt's bytes have, to know those of similar prompts."""

from __future__ import annotations

from array import array

from policies.prefix.cached_blocks import chain_keys
from policies.prefix.fingerprint import Fingerprint
from policies.prefix.learned_prompts import LearnedPrompts

SIZE, BYTES = 4, 64


def text(*parts: tuple[int, int]) -> tuple[list[int], int]:
    # Return the tokens of parts (value, count), as bytes: four per token.
    tokens = [value for value, count in parts for _ in range(count)]
    return tokens, 4 * len(tokens)


def fingerprint(tokens: list[int], n_bytes: int) -> Fingerprint:
    data = [tokens[: BYTES // 4 * block] for block in range(1, n_bytes // BYTES + 1)]
    return Fingerprint(
        array("Q", [hash(tuple(part)) & (1 << 63) - 1 for part in data]), BYTES, n_bytes
    )


def learn(prompts: LearnedPrompts, *parts: tuple[int, int]) -> Fingerprint:
    tokens, n_bytes = text(*parts)
    print_ = fingerprint(tokens, n_bytes)
    prompts.learn(print_, {SIZE: chain_keys(tokens, SIZE, 1)}, len(tokens))
    return print_


def known_tokens(prompts: LearnedPrompts, *parts: tuple[int, int]) -> int:
    known = prompts.find(fingerprint(*text(*parts)))
    return 0 if known is None else known.tokens


def test_a_learned_prompt_is_known_whole() -> None:
    prompts = LearnedPrompts(1 << 20)
    print_ = learn(prompts, (1, 100))
    known = prompts.find(print_)
    assert known is not None
    assert (known.tokens, known.is_whole, prompts.has(print_)) == (100, True, True)


def test_of_a_prompt_that_diverges_the_common_blocks_of_bytes_are_known() -> None:
    prompts = LearnedPrompts(1 << 20)
    learn(prompts, (1, 100))
    assert known_tokens(prompts, (1, 40), (2, 60)) == 32
    assert known_tokens(prompts, (3, 40)) == 0


def test_where_two_prompts_have_diverged_the_common_tokens_are_exact() -> None:
    prompts = LearnedPrompts(1 << 20)
    learn(prompts, (1, 44), (2, 60))
    learn(prompts, (1, 44), (3, 60))
    assert known_tokens(prompts, (1, 44), (4, 60)) == 44


def test_a_prompt_that_continues_another_replaces_it() -> None:
    prompts = LearnedPrompts(1 << 20)
    learn(prompts, (1, 96))
    learn(prompts, (1, 96), (2, 64))
    assert (len(prompts), known_tokens(prompts, (1, 96), (2, 64))) == (1, 160)


def test_the_oldest_prompts_are_dropped_at_the_memory_bound() -> None:
    prompts = LearnedPrompts(20_000)
    for value in range(50):
        learn(prompts, (value, 160))
        assert prompts.used_bytes <= 20_000
    assert 1 < len(prompts) < 50
    assert known_tokens(prompts, (49, 160)) == 160
    assert known_tokens(prompts, (0, 160)) == 0
    prompts.clear()
    assert (len(prompts), prompts.used_bytes) == (0, 0)


def test_a_prompt_without_a_whole_block_is_ignored() -> None:
    prompts = LearnedPrompts(1 << 20)
    learn(prompts, (1, 10))
    assert len(prompts) == 0
