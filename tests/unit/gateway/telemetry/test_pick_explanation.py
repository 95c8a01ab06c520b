"""Tests of the explanation of a pick: candidates, terms of their scores, and refusals."""

from __future__ import annotations

from random import Random

import pytest

from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.telemetry.pick_explanation import next_best, snapshot_pick
from gateway.telemetry.recent_requests import RecentExchanges
from policies import load_ledger, routing_algorithm
from policies.builtin_policies import LeastLoaded
from policies.pricing.endpoint_price import PricedPolicy
from policies.routing_types import Request, RoutingQuery
from tests.unit.gateway.telemetry.ended_requests import candidate, exchange


def test_a_page_lists_candidates_best_first_with_the_terms_at_the_pick() -> None:
    policy, members = (
        PricedPolicy(measured_share=0.0).build(),
        [candidate(slot) for slot in range(3)],
    )
    for member in members:
        member.load.prefill_done_at = float(3 - member.load.slot)
    x, ring = exchange(stream=True), RecentExchanges(1)
    assert x.call is not None
    x.first_query = RoutingQuery(x.call.request, 0.0, Random(1), (0, 0, 0))
    x.pick = routing_algorithm.pick(policy, x.first_query, members)
    assert x.pick is not None
    x.pick_snapshot = snapshot_pick(policy, x.pick)
    x.parsed_at, x.admitted_at = 0.0, 0.5
    members[2].load.prefill_done_at = 99.0  # later changes have no effect
    ring.add(x, TokenUsage(), 0, 1.0)
    page = ring.find_as_json(x.id)
    assert page is not None
    assert page["admission"] == {"verdict": "admitted", "waited_s": 0.5}
    pick = page["pick"]
    assert isinstance(pick, dict)
    assert (pick["policy"], pick["endpoint"], pick["runner_up"]) == ("priced", "tp2", "tp1")
    assert [item["endpoint"] for item in pick["candidates"]] == ["tp2", "tp1", "tp0"]
    for member in pick["candidates"]:
        assert sum(member["terms"].values()) == pytest.approx(-member["score"])


def test_the_runner_up_is_the_next_best_by_complete_prices() -> None:
    policy, members = (
        PricedPolicy(measured_share=0.0).build(),
        [candidate(slot) for slot in range(4)],
    )
    for slot, queue_s in ((1, 1.5), (2, 1.6), (3, 2.5)):
        members[slot].load.prefill_done_at = queue_s
    members[1].load.decode_s_per_token *= 8.0  # so expensive that its price is not computed fully
    x, ring = exchange(stream=True), RecentExchanges(1)
    assert x.call is not None
    x.first_query = RoutingQuery(x.call.request, 0.0, Random(1), (0, 0, 0, 0))
    x.pick = routing_algorithm.pick(policy, x.first_query, members)
    assert x.pick is not None
    assert x.pick.scores[1] > x.pick.scores[2]
    x.pick_snapshot = snapshot_pick(policy, x.pick)
    ring.add(x, TokenUsage(), 0, 1.0)
    page = ring.find_as_json(x.id)
    assert page is not None
    pick = page["pick"]
    assert isinstance(pick, dict)
    assert (pick["endpoint"], pick["runner_up"]) == ("tp0", "tp2")


def test_an_explanation_prices_the_answers_that_ran_at_the_pick() -> None:
    policy, members = (
        PricedPolicy(measured_share=0.0).build(),
        [candidate(slot) for slot in range(2)],
    )
    for member in members:
        load_ledger.set_modelled(member.load, True, 0.0)
        for at_s in (0.0, 0.2):
            entry = load_ledger.reserve(member.load, Request("r", "demo", "", 500, 200), 0, at_s)
            entry.on_first_token(at_s + 0.1)
    query = RoutingQuery(Request("r", "demo", "", 4000, 50), 0.5, Random(1), (0, 0))
    pick = routing_algorithm.pick(policy, query, members)
    assert pick is not None
    snapshot = snapshot_pick(policy, pick)
    assert snapshot is not None
    assert policy.price_terms is not None
    before = policy.price_terms(query, members)
    for member in members:
        load_ledger.reserve(member.load, Request("r", "demo", "", 500, 20), 0, 0.6)
    terms = snapshot.score_terms(query, members)
    for member, expected in zip(members, before, strict=True):
        assert expected["others"] > 0.0
        assert terms[member.endpoint.name] == pytest.approx(expected)


def test_a_policy_without_terms_is_recorded_without_them() -> None:
    policy, members = LeastLoaded().build(), [candidate(0, 50), candidate(1)]
    pick = routing_algorithm.pick(
        policy, RoutingQuery(Request("r", "demo", "", 10, 10), 0.0, Random(1)), members
    )
    assert pick is not None
    assert snapshot_pick(policy, pick) is None
    assert next_best(pick) == [members[0]]


def test_a_refusal_is_shown_with_its_numbers() -> None:
    x, ring = exchange(), RecentExchanges(1)
    x.status, x.outcome, x.reason, x.detail = 429, "refused", "price", "3.0 s are queued."
    ring.add(x, TokenUsage(), 0, 1.0)
    page = ring.find_as_json(x.id)
    assert page is not None
    assert page["admission"] == {
        "verdict": "refused",
        "reason": "price",
        "detail": "3.0 s are queued.",
    }
