"""Tests of one rank's KV events (reports of cached blocks): replays, restarts and limits."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from gateway.fleet.kv_events import rank_event_stream as source_module
from gateway.fleet.kv_events.rank_event_stream import CHECK_S, REPLAY_TIMEOUT_S, EventSource
from policies.prefix.cached_blocks import CachedBlocks


def payload(*events: dict[str, Any], ts: float = 1.0) -> bytes:
    return msgpack.packb([ts, events, 0])


def store(name: int, parent: int | None = None, **members: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": [name, name],
        "block_size": 2,
        **members,
    }


def remove(name: int, **members: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [name], **members}


def connected(*, has_replay: bool = False, cap_bytes: int = 1 << 20) -> EventSource:
    source = EventSource(CachedBlocks(cap_bytes), has_replay=has_replay)
    source.on_connected(0.0)
    if has_replay:
        source.replay_from = None
        source.on_replay_end(0.0)
    return source


def test_a_stream_from_its_first_message_on_is_complete() -> None:
    source = connected()
    source.on_message(0, payload(store(1), store(2, 1)), 1.0)
    assert (source.is_current, source.blocks.hashes()) == (True, {1, 2})


def test_the_first_event_of_a_cold_engine_is_replayed_if_it_came_before_the_subscription() -> None:
    source = connected(has_replay=True)
    assert source.is_current
    source.tick(CHECK_S)
    assert source.replay_from == 0
    source.replay_from = None
    source.on_replayed(0, payload(store(1)), CHECK_S)
    source.on_replay_end(CHECK_S)
    assert (source.is_current, source.gaps, source.blocks.hashes()) == (True, 1, {1})


def test_a_check_that_finds_nothing_leaves_a_cold_engine_complete() -> None:
    source = connected(has_replay=True)
    source.tick(CHECK_S)
    source.replay_from = None
    source.on_replay_end(CHECK_S)
    assert (source.is_current, source.gaps, source.restarts) == (True, 0, 0)
    source.on_message(0, payload(store(1)), 2.0)
    assert source.blocks.hashes() == {1}


def test_a_message_that_is_too_long_to_be_held_is_replayed_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = connected(has_replay=True)
    source.on_message(0, payload(store(1)), 1.0)
    monkeypatch.setattr(source_module, "MAX_HELD_BYTES", 10)
    source.on_message(2, payload(store(3)), 1.0)
    assert source.replay_from == 0


def test_a_stream_joined_late_is_complete_once_the_cache_has_turned_over() -> None:
    source = connected()
    source.kv_tokens = 6
    source.on_message(7, payload(store(1), store(2)), 1.0)
    assert source.state == "incomplete"
    source.on_message(8, payload(store(3)), 2.0)
    assert source.is_current


def test_an_emptied_cache_is_known_completely() -> None:
    source = connected()
    source.on_message(7, payload(store(1), {"type": "AllBlocksCleared"}, store(2)), 1.0)
    assert (source.is_current, source.blocks.hashes()) == (True, {2})


def test_a_gap_without_replay_empties_the_rank() -> None:
    source = connected()
    source.on_message(0, payload(store(1)), 1.0)
    source.on_message(2, payload(store(3)), 2.0)
    assert (source.is_current, source.blocks.hashes(), source.gaps) == (False, {3}, 1)


def test_a_gap_is_closed_by_a_replay_and_later_messages_wait_for_it() -> None:
    source = connected(has_replay=True)
    source.on_message(0, payload(store(1)), 1.0)
    source.on_message(2, payload(store(3), ts=3.0), 1.0)
    assert (source.replay_from, source.is_current) == (1, False)
    source.replay_from = None
    source.on_replayed(1, payload(store(2), ts=2.0), 1.0)
    source.on_replay_end(1.0)
    assert (source.is_current, source.blocks.hashes()) == (True, {1, 2, 3})


def test_a_replay_that_begins_too_late_leaves_the_rank_incomplete() -> None:
    source = connected(has_replay=True)
    source.on_message(0, payload(store(1)), 1.0)
    source.on_message(5, payload(store(6), ts=3.0), 1.0)
    source.replay_from = None
    source.on_replayed(4, payload(store(5), ts=2.0), 1.0)
    source.on_replay_end(1.0)
    assert (source.is_current, source.blocks.hashes()) == (False, {5, 6})


def test_a_replay_without_an_answer_is_given_up() -> None:
    source = connected(has_replay=True)
    source.on_message(0, payload(store(1)), 1.0)
    source.on_message(5, payload(store(6), ts=3.0), 1.0)
    source.tick(1.0 + REPLAY_TIMEOUT_S + 0.1)
    assert (source.state, source.blocks.hashes()) == ("incomplete", {6})


def test_a_number_that_falls_back_with_a_later_time_is_a_restart() -> None:
    source = connected()
    source.on_message(0, payload(store(1), ts=1.0), 1.0)
    source.on_message(1, payload(store(2), ts=2.0), 1.0)
    source.on_message(1, payload(store(2), ts=2.0), 1.0)
    assert (source.duplicates, source.restarts) == (1, 0)
    source.on_message(0, payload(store(9), ts=5.0), 2.0)
    assert (source.restarts, source.blocks.hashes(), source.is_current) == (1, {9}, True)


def test_a_demotion_to_another_medium_is_no_removal() -> None:
    source = connected()
    source.on_message(0, payload(store(1), store(1, medium="CPU")), 1.0)
    source.on_message(1, payload(remove(1, medium="GPU"), ts=2.0), 1.0)
    assert source.blocks.hashes() == {1}
    source.on_message(2, payload(remove(1, medium="CPU"), ts=3.0), 1.0)
    assert not source.blocks.hashes()


def test_of_a_hybrid_models_groups_only_full_attention_counts() -> None:
    source = connected()
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    source.on_message(0, payload(store(1, **window), store(2, **full)), 1.0)
    source.on_message(1, payload(remove(2, group_idx=0), ts=2.0), 1.0)
    assert source.blocks.hashes() == {2}


def test_events_that_cannot_be_used_end_the_reading_of_the_rank() -> None:
    source = connected()
    source.on_message(0, payload(store(1, token_ids=[-1, 2])), 1.0)
    assert source.problem.startswith("an event has invalid tokens")
    source.on_message(1, payload(store(2)), 1.0)
    assert (source.is_current, len(source.blocks)) == (False, 0)


def test_a_new_connection_is_read_again_after_events_that_cannot_be_used() -> None:
    source = connected()
    source.on_message(0, payload(store(1, token_ids=[-1, 2])), 1.0)
    source.on_disconnected()
    assert source.problem

    source.on_connected(2.0)
    source.on_message(0, payload(store(1), ts=2.0), 2.0)

    assert (source.problem, source.blocks.hashes()) == ("", {1})


def test_a_source_with_more_blocks_than_memory_gives_up() -> None:
    source = connected(cap_bytes=1000)
    source.on_message(0, payload(*(store(name) for name in range(1, 9))), 1.0)
    assert source.problem == "the cached blocks do not fit into prefix.events"
    assert len(source.blocks) == 0


def test_messages_that_wait_for_a_replay_are_bounded() -> None:
    source = connected(has_replay=True)
    source.on_message(0, payload(store(1)), 1.0)
    for number in range(2, source_module.MAX_HELD_MESSAGES + 4):
        source.on_message(number, payload(store(number), ts=float(number)), 1.0)
    assert source.gaps == 2
    assert len(source.blocks) == 0


def test_a_lost_connection_is_noticed_and_the_last_message_checked_after_it() -> None:
    source = connected(has_replay=True)
    source.on_message(0, payload(store(1)), 1.0)
    source.on_disconnected()
    assert source.state == "not connected"
    source.on_connected(2.0)
    assert source.replay_from == 0
    source.replay_from = None
    source.on_replayed(0, payload(store(1)), 2.0)
    source.on_replay_end(2.0)
    assert (source.is_current, source.restarts, source.blocks.hashes()) == (True, 0, {1})
