"""Tests of when the gateway trusts an engine's KV events (reports of cached blocks).

The gateway compares them with the cached tokens in answers, and detects missing events.
"""

from __future__ import annotations

import msgpack

from gateway.fleet.kv_events.event_verification import (
    FIRST_DISTRUST_S,
    LEAST_AUDITS,
    SILENT_S,
    CacheExpectation,
    EndpointEvents,
)
from gateway.fleet.kv_events.rank_event_stream import EventSource
from policies.prefix.cached_blocks import CachedBlocks


def message(number: int) -> tuple[int, bytes]:
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number] * 16,
        "block_size": 16,
    }
    return number, msgpack.packb([float(number), [event], 0])


def endpoint(ranks: int = 1) -> EndpointEvents:
    index = CachedBlocks(1 << 20)
    sources = [EventSource(index, has_replay=False) for _ in range(ranks)]
    for source in sources:
        source.on_connected(0.0)
        source.on_message(*message(0), 0.0)
    return EndpointEvents(sources)


def test_an_endpoint_is_exact_when_all_its_ranks_are() -> None:
    events = endpoint(2)
    assert events.is_exact(1.0)
    events.sources[1].on_disconnected()
    assert events.obstacle(1.0) == "rank 1: not connected"


def test_an_endpoint_without_sources_says_why_it_is_not_exact() -> None:
    assert (
        EndpointEvents(problem="looking for its source").obstacle(0.0) == "looking for its source"
    )
    assert not EndpointEvents().is_exact(0.0)


def test_answers_that_agree_keep_the_trust() -> None:
    events = endpoint()
    for _ in range(100):
        events.on_answer(CacheExpectation(0.0, 500, 500), 1000, 500, 1.0)
    assert (events.is_exact(1.0), events.audits, events.errors) == (True, 100, 0)


def test_answers_that_disagree_lead_back_to_belief_for_a_while() -> None:
    events = endpoint()
    for _ in range(LEAST_AUDITS):
        events.on_answer(CacheExpectation(0.0, 500, 500), 1000, 0, 1.0)
    assert events.errors == LEAST_AUDITS
    assert len(events.sources[0].blocks) == 0
    events.sources[0].on_message(*message(0), 2.0)
    assert events.obstacle(2.0) == "answers disagree"
    assert events.is_exact(1.0 + FIRST_DISTRUST_S)


def test_more_than_the_index_can_know_is_no_error() -> None:
    events = endpoint()
    for _ in range(20):
        events.on_answer(CacheExpectation(0.0, 500, None), 1000, 990, 1.0)
    assert events.errors == 0


def test_an_answer_whose_blocks_are_not_reported_ends_the_trust_until_events_come() -> None:
    events = endpoint()
    events.on_answer(CacheExpectation(5.0), 1000, 0, 6.0)
    events.tick(6.0 + SILENT_S - 0.1)
    assert events.is_exact(8.0)
    events.tick(6.0 + SILENT_S + 0.1)
    assert events.obstacle(10.0) == "answers without events"
    events.sources[0].on_message(*message(1), 11.0)
    events.tick(11.0)
    assert events.is_exact(11.0)


def test_an_answer_that_computed_nothing_needs_no_events() -> None:
    events = endpoint()
    events.on_answer(CacheExpectation(5.0), 1000, 990, 6.0)
    events.tick(20.0)
    assert events.is_exact(20.0)
