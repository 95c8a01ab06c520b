"""Property tests of prompt fingerprints (hashes of a prompt's blocks), for any prompts."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prefix.block_hash import KeyArithmetic, ScalarArithmetic, chain_words_in_python
from policies.prefix.fingerprint import Fingerprinter
from policies.prefix.numpy_hash import NumpyArithmetic
from policies.prefix.sampled_keys import SAMPLE_LENGTHS, Keys, sample_keys
from tests.c_forms import compile_module, needs_compiler

BLOCK = 16
PRINTS = Fingerprinter(b"0123456789abcdef", block_bytes=BLOCK)

prompts = st.binary(max_size=40 * BLOCK)
words = st.integers(0, 2**64 - 1)


def numbers(count: int) -> st.SearchStrategy[Keys]:
    return st.lists(words, min_size=count, max_size=count).map(lambda values: array("Q", values))


@given(st.binary(max_size=20 * BLOCK), prompts, prompts)
def test_keys_are_equal_exactly_as_far_as_the_prompts_are(
    shared: bytes, one: bytes, other: bytes
) -> None:
    a, b = shared + one, shared + other
    keys_a, keys_b = (
        PRINTS.fingerprint(b"s", a).keys.tolist(),
        PRINTS.fingerprint(b"s", b).keys.tolist(),
    )
    for block, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False)):
        end = (block + 1) * BLOCK
        assert (key_a == key_b) == (a[:end] == b[:end])


@given(prompts)
def test_only_whole_blocks_have_keys_and_all_keys_differ(prompt: bytes) -> None:
    fingerprint = PRINTS.fingerprint(b"s", prompt)
    assert len(fingerprint.keys) == len(prompt) // BLOCK
    assert len(set(fingerprint.keys.tolist())) == len(fingerprint.keys)
    assert fingerprint.n_bytes == len(prompt)


@given(prompts, st.lists(st.integers(0, 40 * BLOCK), max_size=5))
def test_how_a_prompt_is_cut_into_parts_does_not_matter(prompt: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(prompt)) for cut in cuts), len(prompt)]
    parts = [memoryview(prompt)[a:b] for a, b in pairwise(edges)]
    assert (
        PRINTS.fingerprint(b"s", *parts).keys.tolist()
        == PRINTS.fingerprint(b"s", prompt).keys.tolist()
    )


@given(prompts, st.binary(max_size=20), st.binary(max_size=20))
def test_different_salts_share_no_key(prompt: bytes, salt: bytes, other: bytes) -> None:
    keys, others = (
        PRINTS.fingerprint(salt, prompt).keys.tolist(),
        PRINTS.fingerprint(other, prompt).keys.tolist(),
    )
    assert keys == others if salt == other else not set(keys) & set(others)


@given(prompts)
def test_different_secrets_share_no_key(prompt: bytes) -> None:
    stranger = Fingerprinter(b"fedcba9876543210", block_bytes=BLOCK)
    assert not set(PRINTS.fingerprint(b"s", prompt).keys.tolist()) & set(
        stranger.fingerprint(b"s", prompt).keys.tolist()
    )


@given(
    numbers(2), numbers(300), words, words, words, st.binary(min_size=BLOCK, max_size=300 * BLOCK)
)
def test_word_by_word_gives_the_keys_that_whole_arrays_give(
    word_keys: Keys, position_keys: Keys, fold: int, mix: int, seed: int, data: bytes
) -> None:
    def keys(arithmetic: type[KeyArithmetic]) -> list[int]:
        return (
            arithmetic(word_keys, position_keys, fold, mix)
            .chain_keys(seed, memoryview(data), len(data) // BLOCK)
            .tolist()
        )

    assert keys(ScalarArithmetic) == keys(NumpyArithmetic)


@needs_compiler
@given(
    st.integers(1, 9).flatmap(numbers),
    numbers(40),
    *(words, words, words),
    st.binary(max_size=400),
    st.integers(0, 7),
)
def test_the_loop_in_c_gives_the_same_keys(
    word_keys: Keys, position_keys: Keys, fold: int, mix: int, seed: int, data: bytes, offset: int
) -> None:
    prompt = memoryview(data)[offset:]
    blocks = len(prompt) // (8 * len(word_keys))
    wanted = array("Q", bytes(8 * blocks))
    chain_words_in_python(prompt, word_keys, position_keys, fold, mix, seed, wanted)
    for flags in ((), ("-DWITHOUT_AVX2",)):
        c_form, keys = (
            compile_module("policies/prefix/_block_hash.c", *flags),
            array("Q", bytes(8 * blocks)),
        )
        c_form.chain_words(prompt, word_keys, position_keys, fold, mix, seed, keys)
        assert keys == wanted


@needs_compiler
def test_a_prompt_that_is_too_short_for_its_keys_is_an_error_in_c() -> None:
    c_form = compile_module("policies/prefix/_block_hash.c")
    two, three = array("Q", [1, 2]), array("Q", [1, 2, 3])
    for data, position_keys in ((bytes(47), three), (bytes(48), two)):
        with pytest.raises(ValueError, match="too short"):
            c_form.chain_words(data, two, position_keys, 1, 1, 0, array("Q", three))


@given(st.integers(0, 1000))
def test_an_index_has_entries_for_less_and_less_of_a_longer_chain(blocks: int) -> None:
    result = sample_keys(array("Q", range(1, blocks + 1))).tolist()
    assert result == [length for length in SAMPLE_LENGTHS if length <= blocks]
    assert all(longer - length <= 1 + length // 32 for length, longer in pairwise(result))
