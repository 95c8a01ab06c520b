"""Tests of the decision whether an endpoint fetches the beginning of a prompt, and from where."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies import routing_algorithm
from policies.pricing.endpoint_price import PricedPolicy
from policies.pricing.pull_decision import (
    LEAST_PULL,
    NO_STORE,
    PullDecision,
    PullPricer,
    StoredTokens,
    StoreTimes,
)
from policies.pricing.split_decision import SplitRule
from policies.pricing.transfer_time import TransferTimes
from policies.routing_types import Candidate
from tests.unit.policies.builders import ask, outlook

POLICY = PricedPolicy().build()
PROMPT, HELD = 20_000, 19_456


def decided(
    candidates: Sequence[Candidate],
    cached: Sequence[int],
    rule: SplitRule | None = None,
    transfers: TransferTimes | None = None,
    stored: StoredTokens | None = None,
    store: StoreTimes = NO_STORE,
) -> PullDecision | None:
    query = ask(PROMPT, cached=cached)
    whole = routing_algorithm.pick(POLICY, query, candidates)
    assert whole is not None
    pricer = PullPricer(POLICY, rule or SplitRule(1), transfers, store)
    return pricer.decide(query, candidates, whole, stored or StoredTokens())


def busy(slot: int, seconds: float) -> Candidate:
    return outlook(slot, prefill_done_at=100.0 + seconds)


def test_a_prompt_is_pulled_from_a_busy_endpoint_and_not_from_an_idle_one() -> None:
    pull = decided([busy(0, 2.0), outlook(1)], (HELD, 0), transfers=TransferTimes())
    assert pull is not None
    assert pull.is_remote
    assert (pull.source.load.slot, pull.pick.candidate.load.slot) == (0, 1)
    assert (pull.pulled_tokens, pull.pick.cached_tokens) == (HELD, HELD)

    assert decided([outlook(0), outlook(1)], (HELD, 0), transfers=TransferTimes()) is None


@pytest.mark.parametrize(("kv_token_s", "is_pulled"), [(6.5e-6, True), (2e-3, False)])
def test_a_slow_link_is_not_used(kv_token_s: float, is_pulled: bool) -> None:
    rule = SplitRule(1, kv_token_s=kv_token_s)
    pull = decided([busy(0, 2.0), outlook(1)], (HELD, 0), rule, TransferTimes())
    assert (pull is not None) == is_pulled


def test_a_queue_on_the_link_of_the_source_leads_to_another_source() -> None:
    transfers = TransferTimes()
    transfers.record(("tp0", "tp2"), 10_000, 0.1, 99.0)
    for _ in range(5):
        transfers.begin(("tp0", "tp3"), 20_000, 6.5e-6, 99.9)
    endpoints = [busy(0, 2.0), busy(1, 2.0), outlook(2)]
    pull = decided(endpoints, (HELD, HELD, 0), transfers=transfers)
    assert pull is not None
    assert pull.source.load.slot == 1


def test_a_few_tokens_are_not_pulled() -> None:
    cached = (HELD, HELD - LEAST_PULL + 1)
    assert decided([busy(0, 5.0), outlook(1)], cached, transfers=TransferTimes()) is None


def test_the_store_of_an_endpoints_own_host_is_read_without_links() -> None:
    stored = StoredTokens(in_memory=(0, HELD))
    quick = StoreTimes(memory_token_s=6.5e-6)
    pull = decided([outlook(0), outlook(1)], (), stored=stored, store=quick)
    assert pull is not None
    assert not pull.is_remote
    assert pull.pick.candidate.load.slot == 1

    slow = StoreTimes(memory_token_s=2e-3)
    assert decided([outlook(0), outlook(1)], (), stored=stored, store=slow) is None


def test_a_disk_delays_what_is_on_it_alone() -> None:
    times = StoreTimes(memory_token_s=6.5e-6, disk_token_s=2e-3)
    on_disk = StoredTokens(in_memory=(), in_all=(0, HELD))
    assert decided([outlook(0), outlook(1)], (), stored=on_disk, store=times) is None
    in_both = StoredTokens(in_memory=(0, HELD), in_all=(0, HELD))
    assert decided([outlook(0), outlook(1)], (), stored=in_both, store=times) is not None


def test_a_transfer_teaches_its_time_and_occupies_its_links_until_the_first_token() -> None:
    transfers = TransferTimes()
    pricer = PullPricer(POLICY, SplitRule(1), transfers)
    query, candidates = ask(PROMPT, cached=(HELD, 0)), [busy(0, 2.0), outlook(1)]
    whole = routing_algorithm.pick(POLICY, query, candidates)
    assert whole is not None
    pull = pricer.decide(query, candidates, whole)
    assert pull is not None

    transfer = pricer.begin(pull, 100.0)
    assert transfer is not None
    names = ("tp0", "tp1")
    assert transfers.backlog_s(names, 100.0) > 0.0
    pricer.end(pull, transfer, 100.0, 102.0 + pull.own_s)
    assert transfers.backlog_s(names, 102.0 + pull.own_s) == 0.0
    assert transfers.speed(names, 6.5e-6, 102.0).token_s > 5e-5
