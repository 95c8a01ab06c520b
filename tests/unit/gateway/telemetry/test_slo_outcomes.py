"""Tests of whether requests met their latency budgets, and of what is learned from them."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from gateway.config import Observability
from gateway.metrics.catalogue import Metrics
from gateway.protocol import api_table
from gateway.protocol.request.call import Call
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.pick_explanation import RecentExchanges, next_best, snapshot_pick
from gateway.telemetry.slo_outcomes import (
    LEARN_BATCH,
    LEARN_SINGLY,
    SloTracker,
    admission_outcome,
    stream_outcome,
    whole_outcome,
)
from gateway.telemetry.span_exporter import SpanExporter
from policies import load_ledger, routing_algorithm
from policies.endpoint_load import EndpointLoad
from policies.prefix.fingerprint import Fingerprinter
from policies.presets import LeastLoaded
from policies.pricing.endpoint_price import PricedPolicy
from policies.routing_types import Candidate, Endpoint, Pick, Request, RoutingQuery, Slo

SLO = Slo("interactive", 1.0, 0.05, 4.0)


def candidate(slot: int, prefill_tokens: int = 0) -> Candidate:
    built = Candidate(
        Endpoint(f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "main", "demo"), EndpointLoad(slot)
    )
    built.load.prefill_tokens = prefill_tokens
    return built


def exchange(number: int = 1, **request: object) -> Exchange:
    x = Exchange(f"req_{number}", api_table.CHAT, "127.0.0.1", 0.0)
    x.received_at, x.model = 0.0, "demo"
    x.call = Call(
        api_table.CHAT, Request(x.id, "demo", "", 1000, 100, slo=SLO, **request), "demo", b"{}", ()
    )  # type: ignore[arg-type]
    return x


def answered(first_s: float, last_s: float, tokens: int, events: int | None = None) -> Relay:
    relay = Relay(b"")
    relay.first_token_at, relay.last_data_at, relay.is_committed = first_s, last_s, True
    relay.event_count = tokens + 2 if events is None else events
    relay._usage_result = TokenUsage(1000, tokens, 0)
    return relay


def count(x: Exchange, relay: Relay) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    SloTracker(metrics).on_answered(x, relay, relay.usage, 0.0)
    return {labels: item.value for labels, item in metrics.goodput_total.children()}


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "outcome"),
    [
        (1.0, 0.05, "met"),
        (1.01, 0.05, "ttft_missed"),
        (1.0, 0.051, "tpot_missed"),
        (2.0, 0.06, "both_missed"),
        (0.5, None, "met"),
    ],
)
def test_a_stream_is_judged_by_ttft_and_tpot(
    ttft_s: float, tpot_s: float | None, outcome: str
) -> None:
    assert stream_outcome(SLO, ttft_s, tpot_s) == outcome


def test_an_unstreamed_response_has_the_budget_of_all_its_tokens() -> None:
    assert whole_outcome(SLO, 1.0 + 9 * 0.05, 10) == "met"
    assert whole_outcome(SLO, 1.46, 10) == "ttft_missed"
    assert whole_outcome(SLO, 1.0, 0) == "met"


def test_slo_outcomes_are_counted_by_class_and_by_tenant_if_configured() -> None:
    x = exchange()
    x.tenant = "acme"
    assert count(x, answered(0.5, 0.5 + 9 * 0.04, 10)) == {("interactive", "met", "", "demo"): 1}
    metrics = Metrics()
    tracker = SloTracker(metrics)
    tracker.set_tenant_labels(True)
    relay = answered(0.5, 3.0, 10)
    tracker.on_answered(x, relay, relay.usage, 0.0)
    assert [labels for labels, _ in metrics.goodput_total.children()] == [
        ("interactive", "tpot_missed", "acme", "demo")
    ]


def test_a_broken_response_is_failed_and_a_cancelled_one_is_ignored() -> None:
    broke, left = exchange(1), exchange(2)
    broke.set_interrupted("stall")
    broke.relay = left.relay = answered(0.1, 0.2, 10)
    left.set_client_gone()
    assert count(broke, broke.relay) == {("interactive", "failed", "", "demo"): 1}
    assert count(left, left.relay) == {}
    assert (admission_outcome(broke).status, admission_outcome(left).status) == (
        "dropped",
        "ignored",
    )


def test_a_pre_empted_request_of_a_batch_is_ignored_and_has_no_status() -> None:
    stopped = exchange(1)
    stopped.relay = answered(0.1, 0.2, 10)
    stopped.set_preempted()
    stopped.set_cancelled()
    assert (stopped.status, stopped.outcome) == (0, "preempted")
    assert count(stopped, stopped.relay) == {}
    assert admission_outcome(stopped).status == "ignored"


def test_a_refused_request_is_shed_or_failed_and_a_bad_one_is_neither() -> None:
    metrics = Metrics()
    tracker = SloTracker(metrics)
    for number, status in enumerate((429, 503, 502, 404, 499)):
        x = exchange(number)
        x.status = status
        tracker.on_unanswered(x)
    assert {labels[1]: item.value for labels, item in metrics.goodput_total.children()} == {
        "shed": 1,
        "failed": 2,
    }


def test_the_admission_outcome_has_the_latencies_that_the_client_saw() -> None:
    x = exchange()
    x.relay = answered(0.5, 0.5 + 9 * 0.04, 10)
    observed = admission_outcome(x)
    assert (observed.ttft_s, observed.output_tokens, observed.cached_tokens, observed.status) == (
        0.5,
        10,
        0,
        "served",
    )
    assert observed.tpot_s == pytest.approx(0.04)


def test_a_request_without_a_response_is_dropped_unless_its_engine_rejected_it() -> None:
    failed, refused = exchange(1), exchange(2)
    failed.status, failed.outcome, failed.reason = 502, "refused", "upstream_failed"
    refused.status, refused.outcome, refused.reason = 400, "refused", "engine"
    assert (admission_outcome(failed).status, admission_outcome(refused).status) == (
        "dropped",
        "ignored",
    )


def test_computed_prompt_tokens_are_counted_by_cause() -> None:
    metrics, x, chosen = Metrics(), exchange(), candidate(1)
    x.first_query = RoutingQuery(Request("r", "demo", "", 1000, 100), 0.0, Random(1), (700, 400))
    x.pick = Pick(chosen, 400, 1.0, 2, "test")
    relay = answered(0.1, 0.2, 10)
    SloTracker(metrics).on_answered(x, relay, TokenUsage(1000, 10, 250), 0.0)
    causes = {labels[0]: item.value for labels, item in metrics.prefill_tokens_total.children()}
    assert causes == {"never_seen": 300, "spread": 300, "evicted": 150}


def test_regret_is_the_predicted_ttft_minus_that_of_the_fastest_candidate() -> None:
    metrics, near, far = Metrics(), candidate(0), candidate(1)
    far.load.prefill_done_at = 13.0
    ask = RoutingQuery(Request("r", "demo", "", 1000, 100), 10.0, Random(1))
    SloTracker(metrics).observe_pick_regret(
        ask, Pick(far, 0, 1.0, 2, "test", (0.0, 1.0), (near, far))
    )
    observed = metrics.pick_regret_seconds
    assert (sum(observed.counts), observed.sum) == (1, pytest.approx(3.0))

    # Explaining


def test_the_ring_holds_the_newest_requests_without_their_contents() -> None:
    ring = RecentExchanges(3)
    for number in range(5):
        x = exchange(number)
        x.relay = answered(0.1, 0.2, 10)
        ring.add(x, TokenUsage(), 0, 1.0)
        assert x.call is not None
        assert (x.relay, x.call.body, x.call.prompt) == (None, b"", ())
    assert [ring.find_as_json(f"req_{number}") is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    ring.resize(2)
    assert ring.find_as_json("req_4") is None


def test_a_page_lists_candidates_best_first_with_the_terms_at_the_pick() -> None:
    policy, members = PricedPolicy().build(), [candidate(slot) for slot in range(3)]
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
    policy, members = PricedPolicy().build(), [candidate(slot) for slot in range(4)]
    for slot, queue_s in ((1, 1.5), (2, 1.6), (3, 2.5)):
        members[slot].load.prefill_done_at = queue_s
    members[1].load.decode_s_per_token *= 8.0  # its price is not completed at the pick
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
    policy, members = PricedPolicy().build(), [candidate(slot) for slot in range(2)]
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


@pytest.mark.parametrize(
    ("reason", "seen"), [("stop", 10), ("tool_calls", 10), ("length", None), (None, None)]
)
def test_lengths_are_learned_from_responses_that_ended_naturally(
    reason: str | None, seen: float | None
) -> None:
    tracker, x, relay = SloTracker(Metrics()), exchange(choices=2), answered(0.5, 1.0, 20)
    relay._finish_payload = b"" if reason is None else f'"finish_reason":"{reason}"'.encode()
    tracker.on_answered(x, relay, relay.usage, 0.0)
    assert tracker.output_lengths.estimate("demo", "", SLO.name) == seen


def test_no_length_is_learned_from_a_broken_response() -> None:
    tracker, x, relay = SloTracker(Metrics()), exchange(), answered(0.5, 1.0, 20)
    relay._finish_payload = b'"finish_reason":"stop"'
    x.set_interrupted("stall")
    tracker.on_answered(x, relay, relay.usage, 0.0)
    assert len(tracker.output_lengths) == 0


def test_the_first_responses_of_a_kind_are_learned_from_one_by_one_and_later_ones_in_batches() -> (
    None
):
    tracker, observed = SloTracker(Metrics()), []
    for number in range(LEARN_SINGLY + 2 * LEARN_BATCH):
        x, relay = exchange(number), answered(0.5, 1.0, 10 if number < LEARN_SINGLY else 30)
        assert x.call is not None
        x.call.estimated_tokens = 500
        relay._finish_payload = b'"finish_reason":"stop"'
        tracker.on_answered(x, relay, relay.usage, 0.0)
        observed.append(tracker.output_lengths.estimate("demo", "", SLO.name))
    assert observed[0] == observed[LEARN_SINGLY + LEARN_BATCH - 2] == 10
    assert observed[LEARN_SINGLY + LEARN_BATCH - 1] == pytest.approx(
        (LEARN_SINGLY * 10 + LEARN_BATCH * 30) / (LEARN_SINGLY + LEARN_BATCH)
    )
    assert observed[-1] == pytest.approx(20)  # every response counts, as if learned one by one
    assert tracker.prompt_lengths.correct("demo", False, 500) == 1000


def test_the_tokens_of_images_behind_urls_are_not_learned_as_those_of_text() -> None:
    tracker = SloTracker(Metrics())
    for number in range(LEARN_SINGLY + LEARN_BATCH):
        x, relay = exchange(number), answered(0.5, 1.0, 10)  # 1,000 tokens of prompt
        assert x.call is not None
        x.call.estimated_tokens = 80 if number % 2 else 500
        tracker.on_answered(x, relay, relay.usage, 0.0)
    assert tracker.prompt_lengths.correct("demo", False, 500) == 1000


def test_the_tenant_label_can_be_turned_on_at_run_time() -> None:
    metrics, x, relay = Metrics(), exchange(), answered(0.5, 3.0, 10)
    tracker, x.tenant = SloTracker(metrics), "acme"
    tracker.on_answered(x, relay, relay.usage, 0.0)
    tracker.set_tenant_labels(True)
    tracker.on_answered(x, relay, relay.usage, 0.0)
    assert [labels[2] for labels, _ in metrics.goodput_total.children()] == ["", "acme"]


def test_recent_exchanges_hold_no_fingerprint() -> None:
    x = exchange()
    assert x.call is not None
    x.first_query = RoutingQuery(
        x.call.request,
        0.0,
        Random(0),
        (),
        frozenset(),
        Fingerprinter(bytes(16)).fingerprint(b"", bytes(10_000)),
    )
    explained = RecentExchanges(2)
    explained.add(x, TokenUsage(), 0, 1.0)
    assert x.first_query.fingerprint is None


async def test_requests_are_accounted_at_the_end_of_the_turn_and_an_error_loses_no_other() -> None:
    loop, metrics = asyncio.get_running_loop(), Metrics()
    log = AccessLog(
        Observability(access_log="off"), loop, metrics.runtime_gauges.log_lines_dropped_total
    )
    traces = SpanExporter(metrics, Random(1), {})
    accounts = Accounting(metrics, log, traces, loop.call_soon, b"secret")
    broken, refused = exchange(1), exchange(2)
    broken.relay = answered(0.5, 0.5, 1)  # its pick has no prediction
    refused.status, refused.outcome, refused.reason = 503, "refused", "no_capacity"
    accounts.add_ended(broken)
    accounts.add_ended(refused)
    assert not dict(metrics.requests_total.children())
    await asyncio.sleep(0)
    assert {labels: item.value for labels, item in metrics.requests_total.children()} == {
        ("demo", "503", "no_capacity"): 1.0
    }


def test_a_response_without_token_counts_has_the_estimated_length() -> None:
    # Otherwise the quota would be refunded completely.
    x = exchange()
    x.relay = answered(0.5, 0.5, 0, events=0)
    x.relay._usage_result = TokenUsage()
    assert admission_outcome(x).output_tokens == 100
    x.relay.event_count = 12
    assert admission_outcome(x).output_tokens == 12
    x.relay.event_count, x.relay._usage_result = 0, TokenUsage(1000, 0, 0)
    assert admission_outcome(x).output_tokens == 0
