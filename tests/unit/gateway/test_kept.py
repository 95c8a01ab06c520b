"""Promises judged, and what a request that is over teaches: outcomes, goodput, predictions, explanations."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from gateway.account import AccessLog, Accounts
from gateway.config import Observability
from gateway.exchange import Exchange
from gateway.explain import Explained, before, runner_up
from gateway.kept import AT_ONCE, BATCH, Kept, judge, judge_whole, outcome_of
from gateway.metrics import Metrics
from gateway.observe.export import Tracer
from gateway.openai import Api, Call
from gateway.relay import Relay
from gateway.told import Usage
from policies import run
from policies.fingerprint import Fingerprinter
from policies.model import Ask, Candidate, Endpoint, EndpointLoad, Pick, Request, Slo
from policies.presets import LeastLoaded
from policies.price import Priced

SLO = Slo("interactive", 1.0, 0.05, 4.0)


def candidate(slot: int, prefill_tokens: int = 0) -> Candidate:
    each = Candidate(Endpoint(f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "main", "demo"), EndpointLoad(slot))
    each.load.prefill_tokens = prefill_tokens
    return each


def exchange(number: int = 1, **request: object) -> Exchange:
    x = Exchange(f"req_{number}", Api.CHAT, "127.0.0.1", 0.0)
    x.received_at, x.model = 0.0, "demo"
    x.call = Call(Api.CHAT, Request(x.id, "demo", "", 1000, 100, slo=SLO, **request), "demo", b"{}", ())  # type: ignore[arg-type]
    return x


def answered(first_s: float, last_s: float, tokens: int, events: int | None = None) -> Relay:
    relay = Relay(b"")
    relay.first_token_at, relay.last_at, relay.committed = first_s, last_s, True
    relay.events = tokens + 2 if events is None else events
    relay._counts = Usage(1000, tokens, 0)
    return relay


def count(x: Exchange, relay: Relay) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    Kept(metrics).answered(x, relay, relay.usage, 0.0)
    return {labels: each.value for labels, each in metrics.goodput_total.children()}


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "kept"),
    [
        (1.0, 0.05, "met"),
        (1.01, 0.05, "ttft_missed"),
        (1.0, 0.051, "tpot_missed"),
        (2.0, 0.06, "both_missed"),
        (0.5, None, "met"),
    ],
)
def test_a_stream_is_judged_by_its_first_token_and_its_pace(ttft_s: float, tpot_s: float | None, kept: str) -> None:
    assert judge(SLO, ttft_s, tpot_s) == kept


def test_a_whole_answer_may_take_what_all_its_tokens_may() -> None:
    assert judge_whole(SLO, 1.0 + 9 * 0.05, 10) == "met"
    assert judge_whole(SLO, 1.46, 10) == "ttft_missed"
    assert judge_whole(SLO, 1.0, 0) == "met"


def test_promises_are_counted_by_class_and_by_tenant_only_when_asked_for() -> None:
    x = exchange()
    x.tenant = "acme"
    assert count(x, answered(0.5, 0.5 + 9 * 0.04, 10)) == {("interactive", "met", "", "demo"): 1}
    metrics = Metrics()
    kept = Kept(metrics)
    kept.tell_tenants(True)
    relay = answered(0.5, 3.0, 10)
    kept.answered(x, relay, relay.usage, 0.0)
    assert [labels for labels, _ in metrics.goodput_total.children()] == [
        ("interactive", "tpot_missed", "acme", "demo")
    ]


def test_an_answer_that_broke_is_failed_and_one_that_nobody_waited_for_is_nobodys_fault() -> None:
    broke, left = exchange(1), exchange(2)
    broke.interrupted("stall")
    broke.relay = left.relay = answered(0.1, 0.2, 10)
    left.gone()
    assert count(broke, broke.relay) == {("interactive", "failed", "", "demo"): 1}
    assert count(left, left.relay) == {}
    assert (outcome_of(broke).ended, outcome_of(left).ended) == ("dropped", "ignored")


def test_what_was_refused_is_shed_or_failed_and_a_bad_request_is_neither() -> None:
    metrics = Metrics()
    kept = Kept(metrics)
    for number, status in enumerate((429, 503, 502, 404, 499)):
        x = exchange(number)
        x.status = status
        kept.unanswered(x)
    assert {labels[1]: each.value for labels, each in metrics.goodput_total.children()} == {"shed": 1, "failed": 2}


def test_an_outcome_tells_what_the_client_saw() -> None:
    x = exchange()
    x.relay = answered(0.5, 0.5 + 9 * 0.04, 10)
    seen = outcome_of(x)
    assert (seen.ttft_s, seen.output_tokens, seen.cached_tokens, seen.ended) == (0.5, 10, 0, "served")
    assert seen.tpot_s == pytest.approx(0.04)


def test_one_that_never_got_an_answer_was_dropped_unless_its_engine_refused_it() -> None:
    failed, refused = exchange(1), exchange(2)
    failed.status, failed.outcome, failed.reason = 502, "refused", "upstream_failed"
    refused.status, refused.outcome, refused.reason = 400, "refused", "engine"
    assert (outcome_of(failed).ended, outcome_of(refused).ended) == ("dropped", "ignored")


def test_computed_prompt_tokens_are_told_apart_by_what_could_have_spared_them() -> None:
    metrics, x, chosen = Metrics(), exchange(), candidate(1)
    x.asked = Ask(Request("r", "demo", "", 1000, 100), 0.0, Random(1), (700, 400))
    x.pick = Pick(chosen, 400, 1.0, 2, "test")
    relay = answered(0.1, 0.2, 10)
    Kept(metrics).answered(x, relay, Usage(1000, 10, 250), 0.0)
    causes = {labels[0]: each.value for labels, each in metrics.prefill_tokens_total.children()}
    assert causes == {"never_seen": 300, "spread": 300, "evicted": 150}


def test_regret_is_how_much_later_the_first_token_was_expected_than_where_it_was_soonest() -> None:
    metrics, near, far = Metrics(), candidate(0), candidate(1)
    far.load.ready_at = 13.0
    ask = Ask(Request("r", "demo", "", 1000, 100), 10.0, Random(1))
    Kept(metrics).compare(ask, Pick(far, 0, 1.0, 2, "test", (0.0, 1.0), (near, far)))
    seen = metrics.pick_regret_seconds
    assert (sum(seen.counts), seen.sum) == (1, pytest.approx(3.0))


# Explaining


def test_the_ring_keeps_the_newest_and_nothing_of_what_clients_said() -> None:
    ring = Explained(3)
    for number in range(5):
        x = exchange(number)
        x.relay = answered(0.1, 0.2, 10)
        ring.keep(x, Usage(), 0, 1.0)
        assert x.call is not None
        assert (x.relay, x.call.body, x.call.prompt) == (None, b"", ())
    assert [ring.find(f"req_{number}") is not None for number in range(5)] == [False, False, True, True, True]
    ring.resize(2)
    assert ring.find("req_4") is None


def test_a_page_tells_candidates_best_first_with_the_terms_as_they_were_at_the_pick() -> None:
    policy, members = Priced().build(), [candidate(slot) for slot in range(3)]
    for each in members:
        each.load.ready_at = float(3 - each.load.slot)
    x, ring = exchange(stream=True), Explained(1)
    assert x.call is not None
    x.asked = Ask(x.call.request, 0.0, Random(1), (0, 0, 0))
    x.pick = run.pick(policy, x.asked, members)
    assert x.pick is not None
    x.before = before(policy, x.pick)
    x.parsed_at, x.admitted_at = 0.0, 0.5
    members[2].load.ready_at = 99.0  # what came afterwards changes nothing
    ring.keep(x, Usage(), 0, 1.0)
    page = ring.find(x.id)
    assert page is not None
    assert page["admission"] == {"verdict": "admitted", "waited_s": 0.5}
    pick = page["pick"]
    assert isinstance(pick, dict)
    assert (pick["policy"], pick["endpoint"], pick["runner_up"]) == ("priced", "tp2", "tp1")
    assert [each["endpoint"] for each in pick["candidates"]] == ["tp2", "tp1", "tp0"]
    best, second, last = pick["candidates"]
    for each in (best, second):
        assert sum(each["terms"].values()) == pytest.approx(-each["score"])
    assert "terms" not in last


def test_a_policy_without_terms_is_noted_without_them() -> None:
    policy, members = LeastLoaded().build(), [candidate(0, 50), candidate(1)]
    pick = run.pick(policy, Ask(Request("r", "demo", "", 10, 10), 0.0, Random(1)), members)
    assert pick is not None
    assert before(policy, pick) is None
    assert runner_up(pick) is members[0]


def test_a_refusal_is_told_with_its_numbers() -> None:
    x, ring = exchange(), Explained(1)
    x.status, x.outcome, x.reason, x.detail = 429, "refused", "price", "3.0 s are queued."
    ring.keep(x, Usage(), 0, 1.0)
    page = ring.find(x.id)
    assert page is not None
    assert page["admission"] == {"verdict": "refused", "reason": "price", "detail": "3.0 s are queued."}


@pytest.mark.parametrize(("reason", "seen"), [("stop", 10), ("tool_calls", 10), ("length", None), (None, None)])
def test_lengths_are_learnt_from_answers_that_came_to_their_own_end(reason: str | None, seen: float | None) -> None:
    kept, x, relay = Kept(Metrics()), exchange(choices=2), answered(0.5, 1.0, 20)
    relay._reason = b"" if reason is None else f'"finish_reason":"{reason}"'.encode()
    kept.answered(x, relay, relay.usage, 0.0)
    assert kept.lengths.expected("demo", "", SLO.name) == seen


def test_nothing_is_learnt_of_the_length_of_an_answer_that_broke() -> None:
    kept, x, relay = Kept(Metrics()), exchange(), answered(0.5, 1.0, 20)
    relay._reason = b'"finish_reason":"stop"'
    x.interrupted("stall")
    kept.answered(x, relay, relay.usage, 0.0)
    assert len(kept.lengths) == 0


def test_the_first_answers_of_a_kind_are_learnt_from_at_once_and_later_ones_in_batches() -> None:
    kept, seen = Kept(Metrics()), []
    for number in range(AT_ONCE + 2 * BATCH):
        x, relay = exchange(number), answered(0.5, 1.0, 10 if number < AT_ONCE else 30)
        assert x.call is not None
        x.call.estimated_tokens = 500
        relay._reason = b'"finish_reason":"stop"'
        kept.answered(x, relay, relay.usage, 0.0)
        seen.append(kept.lengths.expected("demo", "", SLO.name))
    assert seen[0] == seen[AT_ONCE + BATCH - 2] == 10
    assert seen[AT_ONCE + BATCH - 1] == pytest.approx((AT_ONCE * 10 + BATCH * 30) / (AT_ONCE + BATCH))
    assert seen[-1] == pytest.approx(20)  # no answer is left out: as if each had been learnt from at its end
    assert kept.prompts.corrected("demo", False, 500) == 1000


def test_what_images_behind_urls_count_is_not_learnt_of_text() -> None:
    """A URL is a few tokens of text to the gateway, and 1,000 tokens to the engine."""
    kept = Kept(Metrics())
    for number in range(AT_ONCE + BATCH):
        x, relay = exchange(number), answered(0.5, 1.0, 10)  # 1,000 tokens of prompt
        assert x.call is not None
        x.call.estimated_tokens = 80 if number % 2 else 500
        kept.answered(x, relay, relay.usage, 0.0)
    assert kept.prompts.corrected("demo", False, 500) == 1000


def test_promises_are_counted_by_tenant_from_the_moment_that_is_asked_for() -> None:
    metrics, x, relay = Metrics(), exchange(), answered(0.5, 3.0, 10)
    kept, x.tenant = Kept(metrics), "acme"
    kept.answered(x, relay, relay.usage, 0.0)
    kept.tell_tenants(True)
    kept.answered(x, relay, relay.usage, 0.0)
    assert [labels[2] for labels, _ in metrics.goodput_total.children()] == ["", "acme"]


def test_what_is_kept_to_be_explained_holds_no_fingerprint() -> None:
    x = exchange()
    assert x.call is not None
    x.asked = Ask(x.call.request, 0.0, Random(0), (), frozenset(), Fingerprinter(bytes(16)).of(b"", bytes(10_000)))
    explained = Explained(2)
    explained.keep(x, Usage(), 0, 1.0)
    assert x.asked.fingerprint is None


async def test_requests_are_accounted_at_the_end_of_the_turn_and_one_that_cannot_be_costs_no_other_its_own() -> None:
    loop, metrics = asyncio.get_running_loop(), Metrics()
    log = AccessLog(Observability(access_log="off"), loop, metrics.inside.log_lines_dropped_total)
    accounts = Accounts(metrics, log, Tracer(metrics, Random(1), {}), loop)
    broken, refused = exchange(1), exchange(2)
    broken.relay = answered(0.5, 0.5, 1)  # of whose pick nothing is known
    refused.status, refused.outcome, refused.reason = 503, "refused", "no_capacity"
    accounts.close(broken)
    accounts.close(refused)
    assert not dict(metrics.requests_total.children())
    await asyncio.sleep(0)
    assert {labels: each.value for labels, each in metrics.requests_total.children()} == {
        ("demo", "503", "no_capacity"): 1.0
    }


def test_an_answer_that_nobody_counted_is_taken_to_be_as_long_as_expected() -> None:
    """Else a quota would get all of it back."""
    x = exchange()
    x.relay = answered(0.5, 0.5, 0, events=0)
    x.relay._counts = Usage()
    assert outcome_of(x).output_tokens == 100
    x.relay.events = 12
    assert outcome_of(x).output_tokens == 12
    x.relay.events, x.relay._counts = 0, Usage(1000, 0, 0)
    assert outcome_of(x).output_tokens == 0
