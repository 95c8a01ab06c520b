"""Tests of KV that the engines of a replay fetch from stores or from each other."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.store.store_index import IN_MEMORY, ON_DISK
from planner.replay import (
    FleetSpec,
    GroupFault,
    GroupKind,
    ReplayOptions,
    ReplayRun,
    RequestEnd,
    traffic,
)
from planner.replay.fleet_sim import Fleet
from planner.replay.host_store import HostStore
from planner.traces import TraceRequest
from policies import policy_registry

DOCUMENT = 24
"""Blocks of 512 tokens of each shared document."""

KIND = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=2, kv_tokens=40_000)
STORED = msgspec.structs.replace(KIND, store_gb=200.0, store_gb_s=50.0)


def asked(documents: list[int], every_s: float, question: int = 300) -> list[TraceRequest]:
    # One request per item, for the document of this number.
    return [
        TraceRequest(
            number * every_s,
            DOCUMENT * 512 + question,
            20,
            (*range(100 * document, 100 * document + DOCUMENT), 10**6 + number),
        )
        for number, document in enumerate(documents)
    ]


def fleet_of(spec: FleetSpec, requests: list[TraceRequest], policy: str = "priced") -> Fleet:
    options = ReplayOptions(seed=1, learns_lengths=True)
    return Fleet(spec, traffic(requests), policy_registry.build(policy, {}), None, options)


def test_a_store_evicts_from_memory_first_and_of_a_prompt_its_last_block() -> None:
    store = HostStore(3, 5)
    store.put([1, 2])
    store.put([11, 12])
    assert store.places([1, 2]) == bytes([IN_MEMORY | ON_DISK, ON_DISK])
    assert store.places([11, 12, 13]) == bytes([IN_MEMORY | ON_DISK] * 2)
    store.put([21, 22])
    assert store.places([1, 2]) == bytes([ON_DISK])
    assert store.places([2]) == b""


@pytest.mark.parametrize("policy", ["priced", "round_robin"])
def test_a_document_that_left_the_gpus_is_fetched_from_its_host(policy: str) -> None:
    documents = [number % 8 for number in range(48)]
    without = fleet_of(FleetSpec("two", (KIND,)), asked(documents, 2.0), policy).run()
    stored = fleet_of(FleetSpec("two", (STORED,)), asked(documents, 2.0), policy).run()

    late = [record.cached_tokens for record in stored.records[16:]]
    assert late == [DOCUMENT * 512] * 32
    assert sum(record.cached_tokens or 0 for record in without.records[16:]) < sum(late) / 2
    assert all(record.ttft_s < 0.5 for record in stored.records[16:])


def test_a_slow_disk_is_not_worth_a_fetch() -> None:
    slow = msgspec.structs.replace(
        KIND, store_gb=4.0, store_disk_gb=2000.0, store_disk_gb_s=0.05, count=1
    )
    run = fleet_of(FleetSpec("one", (slow,)), asked([n % 8 for n in range(40)], 3.0)).run()
    slowest = max(record.ttft_s or 0.0 for record in run.records[20:])
    assert slowest < 1.5  # all of a document would take 80 s


def test_an_engine_pulls_what_a_busy_one_has_cached() -> None:
    requests = asked([0] * 24, 0.02)
    requests[0] = msgspec.structs.replace(requests[0], arrival_s=-5.0)
    run = fleet_of(FleetSpec("two", (KIND,), pulls=True), requests).run()

    pulled = [record for record in run.records if record.pulled_from]
    assert pulled
    assert all(record.pulled_from != record.group for record in pulled)
    assert all(record.cached_tokens == DOCUMENT * 512 for record in run.records[1:])
    assert {record.group for record in run.records} == {"tp0", "tp1"}


def test_a_pull_waits_until_its_source_has_computed_the_prompt() -> None:
    run = fleet_of(FleetSpec("two", (KIND,), pulls=True), asked([0] * 30, 0.01)).run()
    computed = [record for record in run.records if not record.cached_tokens]
    assert len(computed) <= 2
    assert all(record.end is RequestEnd.SERVED for record in run.records)


def test_without_shared_documents_nothing_is_pulled() -> None:
    requests = asked(list(range(30)), 0.3)
    plain = fleet_of(FleetSpec("two", (KIND,)), requests).run()
    pulls = fleet_of(FleetSpec("two", (KIND,), pulls=True), requests).run()
    assert [record.done_s for record in pulls.records] == [r.done_s for r in plain.records]


def told(run: ReplayRun) -> list[tuple[object, ...]]:
    return [(record.group, record.pulled_from, record.done_s) for record in run.records]


@given(
    documents=st.lists(st.integers(0, 5), min_size=5, max_size=40),
    every_s=st.sampled_from([0.02, 0.3, 2.0]),
    memory_gb=st.sampled_from([0.0, 10.0, 100.0]),
    disk_gb=st.sampled_from([0.0, 100.0]),
    pulls=st.booleans(),
    lost_at_s=st.sampled_from([None, 0.3, 2.5]),
)
@settings(max_examples=25, deadline=None)
def test_every_request_ends_and_all_memory_is_given_back(
    documents: list[int],
    every_s: float,
    memory_gb: float,
    disk_gb: float,
    pulls: bool,
    lost_at_s: float | None,
) -> None:
    kind = msgspec.structs.replace(KIND, store_gb=memory_gb, store_disk_gb=disk_gb)
    spec = FleetSpec("two", (kind,), pulls=pulls)
    faults = () if lost_at_s is None else (GroupFault(lost_at_s, 0, duration_s=1.0),)
    options = ReplayOptions(seed=1, learns_lengths=True, faults=faults)
    policy = policy_registry.build("priced", {})
    fleet = Fleet(spec, traffic(asked(documents, every_s)), policy, None, options)
    run = fleet.run()

    assert all(record.end is not RequestEnd.CUT for record in run.records)
    assert not fleet.inflight
    for group in fleet.groups:
        scheduler = group.engine.scheduler  # type: ignore[union-attr]
        assert scheduler.pool.free == scheduler.pool.total
        scheduler.pool.check()
        assert not group.expected_keys
        assert group.load.in_flight == 0
    again = Fleet(
        spec,
        traffic(asked(documents, every_s)),
        policy_registry.build("priced", {}),
        None,
        options,
    )
    assert told(again.run()) == told(run)
