"""Tests of whether requests met their latency budgets, and of what is learned from them."""

from __future__ import annotations

from random import Random

import pytest

from gateway.metrics.catalogue import Metrics
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from gateway.telemetry.slo_outcomes import (
    LEARN_BATCH,
    LEARN_SINGLY,
    SloTracker,
    admission_outcome,
    stream_outcome,
    whole_outcome,
)
from policies.routing_types import Pick, Request, RoutingQuery
from tests.unit.gateway.telemetry.ended_requests import SLO, answered, candidate, exchange


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
