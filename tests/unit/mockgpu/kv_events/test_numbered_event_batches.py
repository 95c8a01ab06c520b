"""Tests of KV events (reports of cached blocks) in the formats of vLLM and SGLang."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import pytest

from mockgpu.fault_grammar import FaultKind
from mockgpu.kv_events.delivery_faults import LATE_S
from mockgpu.kv_events.numbered_event_batches import KvEventSpec, KvEventStream
from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job, Scheduler


class Faults:
    def __init__(self, *kinds: FaultKind) -> None:
        self.active = set(kinds)

    def strikes(self, kind: FaultKind) -> bool:
        return kind in self.active


def stream(form: str = "map", faults: Faults | None = None, **options: int) -> KvEventStream:
    return KvEventStream(KvEventSpec(form=form, **options), 4, (faults or Faults()).strikes)


def job(salt: str = "") -> Job:
    tokens = array("I", [1, 2, 3, 4, 5, 6, 7, 8]).tobytes()
    return Job(8, 1, [7, 1 << 63], tokens=tokens, salt=salt)


def published(events: KvEventStream) -> list[Any]:
    ((_, payload),) = events.flush(1.5, 0.0)
    ts, batch, rank = msgpack.unpackb(payload)
    assert (ts, rank) == (1.5, 0)
    return batch


def test_stored_blocks_as_maps_have_the_members_of_vllm() -> None:
    events, request = stream(), job("tenant-a")
    events.on_stored(request, 0)
    (first,) = published(events)
    assert first == {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "medium": "GPU",
        "extra_keys": [["tenant-a"]],
    }
    events.on_stored(request, 1)
    (second,) = published(events)
    assert (second["parent_block_hash"], second["token_ids"]) == (7, [5, 6, 7, 8])
    assert "extra_keys" not in second


@pytest.mark.parametrize("form", ["map", "array"])
def test_consecutive_blocks_of_a_request_in_a_step_are_one_event(form: str) -> None:
    events, request, other = stream(form), job("tenant-a"), job()
    events.on_stored(request, 0)
    events.on_stored(request, 1)
    events.on_stored(other, 0)
    both, single = published(events)
    names, parent, tokens = list(both.values())[1:4] if form == "map" else both[1:4]
    assert (names, parent, tokens) == ([7, 1 << 63], None, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (both["extra_keys"] if form == "map" else both[8]) == [["tenant-a"], None]
    assert (single["block_hashes"] if form == "map" else single[1]) == [7]


def test_an_eviction_between_two_blocks_keeps_the_order_of_events() -> None:
    events, request = stream(), job()
    events.on_stored(request, 0)
    events.on_removed(99)
    events.on_stored(request, 1)
    assert [event["block_hashes"] for event in published(events)] == [[7], [99], [1 << 63]]


def test_each_block_of_sglang_is_an_event() -> None:
    events, request = stream("sglang"), job()
    events.on_stored(request, 0)
    events.on_stored(request, 1)
    assert [event["block_hashes"] for event in published(events)] == [[7], [-(1 << 63)]]


def test_blocks_that_are_not_consecutive_are_separate_events() -> None:
    events, long = stream(), Job(12, 1, [7, 8, 9], tokens=array("I", range(12)).tobytes())
    events.on_stored(long, 0)
    events.on_stored(long, 2)
    first, second = published(events)
    assert (first["block_hashes"], second["block_hashes"]) == ([7], [9])
    assert (second["parent_block_hash"], second["token_ids"]) == (8, [8, 9, 10, 11])


def test_arrays_begin_with_the_type_and_omit_trailing_defaults() -> None:
    events = stream("array")
    events.on_stored(job(), 0)
    events.on_removed(7)
    events.on_cleared()
    assert published(events) == [
        ["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU"],
        ["BlockRemoved", [7], "GPU"],
        ["AllBlocksCleared"],
    ]


def test_hashes_of_sglang_are_signed_and_the_salt_is_a_member() -> None:
    events = stream("sglang")
    events.on_stored(job("tenant-a"), 1)
    (event,) = published(events)
    assert (event["block_hashes"], event["cache_salt"]) == ([-(1 << 63)], "tenant-a")


def test_the_scheduler_reports_what_enters_and_leaves_the_prefix_cache() -> None:
    scheduler = Scheduler(BlockPool(3, 4))
    stored: list[int] = []
    removed: list[int] = []
    scheduler.on_shared = lambda job, place: stored.append(job.keys[place])
    scheduler.pool.on_evicted = removed.append
    for keys in ([1, 2], [1, 3], [4, 5]):
        scheduler.add(Job(8, 1, keys))
        while (plan := scheduler.step()) is not None:
            scheduler.finish(plan)
    cached = set(scheduler.pool.cached_keys())
    assert stored == [1, 2, 3, 4, 5]
    assert removed
    assert set(stored) - set(removed) == cached


def test_without_events_no_message_is_published() -> None:
    assert stream().flush(0.0, 0.0) == []


def message_numbers(events: KvEventStream, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        events.on_removed(1)
        numbers += [number for number, _ in events.flush(0.0, 0.0)]
    return numbers


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FaultKind.EVENTS_LOST, []),
        (FaultKind.EVENTS_DOUBLED, [0, 0, 1, 1, 2, 2]),
        (FaultKind.EVENTS_REORDERED, [1, 0]),
        (FaultKind.EVENTS_LATE, []),
    ],
)
def test_faults_change_the_order_of_messages_and_not_their_replay(
    kind: FaultKind, expected: list[int]
) -> None:
    events = stream(faults=Faults(kind))
    assert message_numbers(events, 3) == expected
    assert [number for number, _ in events.replay(0)] == [0, 1, 2]


def test_late_messages_follow_younger_ones() -> None:
    faults = Faults(FaultKind.EVENTS_LATE)
    events = stream(faults=faults)
    message_numbers(events, 1)
    faults.active.clear()
    assert message_numbers(events, 1) == [1]
    assert [number for number, _ in events.flush(0.0, LATE_S)] == [0]


def test_a_replay_has_only_what_the_buffer_has_and_none_after_a_restart() -> None:
    events = stream(buffer_steps=2)
    message_numbers(events, 4)
    assert [number for number, _ in events.replay(1)] == [2, 3]
    events.restart()
    assert (events.replay(0), message_numbers(events, 1)) == ([], [0])
