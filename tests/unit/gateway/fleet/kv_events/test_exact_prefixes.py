"""Tests of how many cached tokens an answer must report, computed from an engine's KV events."""

from __future__ import annotations

import msgpack

from gateway.fleet.kv_events.event_verification import CacheExpectation, EndpointEvents
from gateway.fleet.kv_events.exact_prefixes import RECENT_S, ExactPrefixes
from policies.prefix.fingerprint import Fingerprint, Fingerprinter

BLOCK = 16
BYTES_PER_TOKEN = 4
PROMPT = bytes(range(256)) * 15  # 3,840 bytes: seven blocks of 512 bytes, and a half
TOKENS = list(range(len(PROMPT) // BYTES_PER_TOKEN))
FINGERPRINTER = Fingerprinter(b"0123456789abcdef")


def stored(tokens: list[int]) -> bytes:
    """Return a KV event which reports that all complete blocks of these tokens are cached."""
    event = {
        "type": "BlockStored",
        "block_hashes": [1000 + start for start in range(0, len(tokens), BLOCK)],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
    }
    return msgpack.packb([1.0, [event], 0])


def prefixes(*cached: int) -> ExactPrefixes:
    """Return an index of cached prompts that has one endpoint with several data-parallel ranks.

    Each argument is the number of the prompt's tokens that one rank has cached.
    """
    index = ExactPrefixes(1 << 20)
    sources = [index.new_source(has_replay=False) for _ in cached]
    for source, count in zip(sources, cached, strict=True):
        source.on_connected(0.0)
        source.on_message(0, stored([7] * BLOCK), 0.0)
        if count:
            source.on_message(1, stored(TOKENS[:count]), 0.0)
    index.endpoints[0] = EndpointEvents(sources)
    index.refresh(0.0)
    return index


def fingerprint(data: bytes = PROMPT) -> Fingerprint:
    return FINGERPRINTER.fingerprint(b"", data)


def sent(index: ExactPrefixes, data: bytes = PROMPT, now: float = 0.0) -> CacheExpectation:
    expected = index.on_sent(fingerprint(data), 0, len(data) // BYTES_PER_TOKEN, now)
    assert expected is not None
    return expected


def known(index: ExactPrefixes) -> ExactPrefixes:
    index.learn(fingerprint(), TOKENS, {BLOCK}, "demo-8b", "")
    return index


def test_a_prompt_that_was_never_sent_is_cached_as_far_as_events_say() -> None:
    expected = sent(known(prefixes(320)))
    assert expected.least == 320
    assert expected.most is not None
    assert 320 <= expected.most < 320 + 512 / BYTES_PER_TOKEN


def test_an_answer_with_more_than_events_say_disagrees() -> None:
    index = known(prefixes(320))
    index.endpoints[0].on_answer(sent(index), len(TOKENS), 900, 0.0)
    assert index.endpoints[0].errors == 1


def test_a_prompt_sent_a_moment_ago_may_be_cached_to_its_last_token() -> None:
    index = known(prefixes(0))
    sent(index)
    index.endpoints[0].on_answer(sent(index), len(TOKENS), len(TOKENS) - 1, 0.0)
    assert index.endpoints[0].errors == 0


def test_what_was_sent_long_ago_must_have_been_reported() -> None:
    index = known(prefixes(0))
    sent(index)
    for turn in (1, 2):
        index.refresh(turn * (RECENT_S + 0.1))
    index.endpoints[0].on_answer(sent(index), len(TOKENS), len(TOKENS) - 1, 5.0)
    assert index.endpoints[0].errors == 1


def test_any_rank_may_serve_a_request_that_is_not_pinned() -> None:
    index = known(prefixes(0, 640))
    for cached in (0, 640):
        index.endpoints[0].on_answer(sent(index), len(TOKENS), cached, 0.0)
    assert index.endpoints[0].errors == 0


def test_an_unknown_prompt_has_no_expectation() -> None:
    assert sent(prefixes(0)) == CacheExpectation(0.0)
