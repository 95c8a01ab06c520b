"""Tests of prompt fingerprints (hashes of a prompt's blocks): invalid input and limited work."""

from __future__ import annotations

from itertools import combinations

import pytest

from policies.prefix.fingerprint import Fingerprinter
from policies.prefix.sampled_keys import MAX_BLOCKS

SECRET = b"sixteen bytes at least"


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes, not 3"):
        Fingerprinter(b"abc")


@pytest.mark.parametrize("size", [0, 4, 12, -8])
def test_a_block_that_is_no_multiple_of_a_word_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Fingerprinter(SECRET, size)


def test_a_prompt_shorter_than_a_block_has_no_keys() -> None:
    fingerprint = Fingerprinter(SECRET).fingerprint(b"", b"hello")
    assert (len(fingerprint.keys), fingerprint.n_bytes) == (0, 5)
    assert repr(fingerprint) == "Fingerprint(0 blocks of 512, 5 bytes)"


def test_work_is_bounded_for_an_endless_prompt() -> None:
    prints = Fingerprinter(SECRET, 8)
    prompt = bytes(8 * MAX_BLOCKS)
    assert len(prints.fingerprint(b"", prompt + bytes(800)).keys) == MAX_BLOCKS
    assert (
        prints.fingerprint(b"", prompt + bytes(800)).keys.tolist()
        == prints.fingerprint(b"", prompt).keys.tolist()
    )


def test_a_chat_turn_continues_the_keys_of_the_turn_before() -> None:
    first = b'{"role":"user","content":"' + b"a" * 700 + b'"}'
    second = b'{"role":"assistant","content":"' + b"b" * 700 + b'"}'
    prints = Fingerprinter(SECRET, 256)
    before, after = (
        prints.fingerprint(b"", b"[" + first + b"]"),
        prints.fingerprint(b"", b"[" + first + b"," + second + b"]"),
    )
    assert len(before.keys) == 2
    assert after.keys.tolist()[:2] == before.keys.tolist()


@pytest.mark.parametrize("bit", [0x20, 0x40, 0x80, 0x01])
def test_the_same_bit_turned_in_the_top_byte_of_two_words_always_shows(bit: int) -> None:
    # In a plain sum of words times odd keys, two differences of 2**63 would cancel out.
    block = bytearray(b"x" * 256)
    observations = {bytes(block)}
    for item, other in combinations(range(7, 256, 8), 2):
        turned = bytearray(block)
        turned[item] ^= bit
        turned[other] ^= bit
        observations.add(bytes(turned))
    prints = Fingerprinter(SECRET, 256)
    assert len({prints.fingerprint(b"", text).keys[0] for text in observations}) == len(
        observations
    )


def test_blocks_in_another_order_are_another_prompt() -> None:
    prints = Fingerprinter(SECRET, 256)
    a, b = b"a" * 256, b"b" * 256
    assert prints.fingerprint(b"", a + b).keys[1] != prints.fingerprint(b"", b + a).keys[1]
