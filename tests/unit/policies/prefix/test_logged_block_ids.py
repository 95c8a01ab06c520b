"""Tests of block identifiers in logs: they reveal equal prompts of one tenant, nothing else."""

from __future__ import annotations

from policies.prefix.fingerprint import Fingerprinter
from policies.prefix.logged_block_ids import ID_BLOCK_BYTES, BlockIds

PROMPT = b"x" * (3 * ID_BLOCK_BYTES)
KEYS = Fingerprinter(b"f" * 32)


def ids(prompt: bytes, tenant: str = "acme", secret: bytes = b"s" * 32) -> list[int]:
    return BlockIds(secret).ids(KEYS.fingerprint(b"salt", prompt), tenant).tolist()


def test_prompts_of_one_tenant_share_the_ids_of_their_common_prefix() -> None:
    one, other = ids(PROMPT + b"1" * ID_BLOCK_BYTES), ids(PROMPT + b"2" * ID_BLOCK_BYTES)
    assert (len(one), len(other)) == (4, 4)
    assert one[:3] == other[:3] == ids(PROMPT)
    assert one[3] != other[3]
    assert all(0 <= id_ < 1 << 48 for id_ in one)


def test_a_tenant_that_guesses_another_ones_prompt_finds_other_ids_in_the_log() -> None:
    assert not set(ids(PROMPT, "acme")) & set(ids(PROMPT, "other"))


def test_the_log_of_another_deployment_has_other_ids() -> None:
    assert not set(ids(PROMPT)) & set(ids(PROMPT, secret=b"t" * 32))


def test_processes_of_one_deployment_write_the_same_ids() -> None:
    assert ids(PROMPT, secret=b"s" * 100) == ids(PROMPT, secret=b"s" * 100)


def test_ids_stay_right_when_there_are_more_tenants_than_are_remembered() -> None:
    blocks, fingerprint = BlockIds(b"s" * 32), KEYS.fingerprint(b"salt", PROMPT)
    first = blocks.ids(fingerprint, "acme")
    for number in range(2000):
        blocks.ids(fingerprint, str(number))
    assert blocks.ids(fingerprint, "acme") == first
