"""Tests of a pick among all endpoints of a large pool, without a shortlist."""

from __future__ import annotations

from policies import policy_registry, routing_algorithm
from policies.prefix.fingerprint import Fingerprinter
from policies.prefix.prefix_index import PrefixIndex
from tests.unit.policies.builders import ask, candidate

SIZE, TOKENS = 40, 128


def test_numbers_of_cached_tokens_stay_as_they_were_at_the_pick() -> None:
    prints, index = Fingerprinter(b"sixteen bytes at least"), PrefixIndex(1 << 20)
    prompt = prints.fingerprint(b"", b"s" * 2 * prints.block_bytes)
    for slot in range(1, SIZE):
        index.insert(prompt, slot, TOKENS)
    match = index.match_holders(prompt, TOKENS)
    assert match.wide
    policy = policy_registry.build("round_robin", {})
    candidates = [candidate(slot) for slot in range(SIZE)]
    pick = routing_algorithm.pick(policy, ask(TOKENS, cached=match), candidates)
    assert pick is not None
    index.insert(prompt, 0, TOKENS)
    index.forget(1)
    assert index.match(prompt, TOKENS) == [TOKENS, 0, *[TOKENS] * (SIZE - 2)]
    assert list(match) == [0, *[TOKENS] * (SIZE - 1)]
