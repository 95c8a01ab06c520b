"""Tests of admission by price: at low load nothing is refused, and each refusal is explained."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from planner.replay.trace_fingerprint import fingerprint_of_chain
from policies.admission.admission_policy import Admit, RequestOutcome, Shed, Wait
from policies.admission.drain_rate import DrainRate
from policies.admission.priced_admission import PricedAdmission, PricedAdmissionParams
from policies.admission_registry import build_admission
from policies.policy_registry import PolicyConfigError
from policies.routing_types import (
    INFERRED_SESSION,
    STANDARD,
    Candidate,
    Pick,
    RoutingQuery,
    SessionHints,
    Slo,
)
from tests.unit.policies.builders import View, ask, candidate, draining, shed

NOW = 100.0


def measured_rate() -> DrainRate:
    return draining(2.0, 30.0, NOW - 30)


def admission(**params: Any) -> PricedAdmission:
    return PricedAdmission(PricedAdmissionParams(**params))


def asking(
    prompt_tokens: int = 1000, now: float = NOW, seed: int = 1, prompt: int = 0, **request: Any
) -> RoutingQuery:
    # Return a query; a `prompt` other than 0 identifies its content.
    question = ask(prompt_tokens, now=now, seed=seed)
    print_ = fingerprint_of_chain((prompt,), 2048, 4 * prompt_tokens) if prompt else None
    return replace(
        question, request=replace(question.request, arrived_s=now, **request), fingerprint=print_
    )


def queued(seconds: float, count: int = 2) -> list[Candidate]:
    return [
        candidate(slot, prefill_done_at=NOW + seconds, in_flight=4, kv_tokens=600_000.0)
        for slot in range(count)
    ]


def refused(
    priced: PricedAdmission,
    candidates: list[Candidate],
    view: View,
    tries: int = 400,
    **request: Any,
) -> float:
    verdicts = [
        priced.decide(asking(seed=seed, **request), candidates, view) for seed in range(tries)
    ]
    return sum(isinstance(verdict, Shed) for verdict in verdicts) / tries


def overload(
    priced: PricedAdmission,
    candidates: list[Candidate],
    tenant: str = "tenant",
    requests: int = 400,
    prompt_tokens: int = 20_000,
) -> None:
    for number in range(requests):
        question = asking(prompt_tokens, tenant=tenant)
        priced.on_reserved(question, Pick(candidates[number % len(candidates)], 0, 0.0, 2, "test"))
    priced.tick(NOW, candidates)


def test_nothing_is_refused_while_the_queue_is_within_the_promise() -> None:
    priced = admission()
    assert refused(priced, queued(0.5), View()) == 0
    assert refused(priced, queued(3.9), View()) == 0
    assert priced.price == 0


def test_beyond_it_the_more_is_refused_the_longer_the_queue_is() -> None:
    shares = [refused(admission(), queued(seconds), View()) for seconds in (4.2, 5.0, 6.0, 9.0)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] > 0.9


@pytest.mark.parametrize("before", [0, 50])
def test_an_impossible_budget_sets_no_price_for_others(before: int) -> None:
    priced, fleet = admission(), queued(0.2)
    for _ in range(before):
        priced.decide(asking(), fleet, View())
    priced.decide(asking(slo=Slo(ttft_s=0.001)), fleet, View())
    assert refused(priced, fleet, View()) == 0


def test_an_impossible_tpot_budget_slows_no_prompts_of_others() -> None:
    priced, fleet, view = admission(), answering(0.03), View(waiting=20, waiting_s=4.0)
    for slo in (*(STANDARD for _ in range(50)), Slo(tpot_s=0.0001)):
        priced.on_reserved(asking(slo=slo), Pick(fleet[0], 0, 0.0, 2, "test"))
    priced.tick(NOW, fleet)
    assert refused(priced, fleet, view) == 0


def test_budgets_up_to_ten_times_as_tight_as_the_typical_one_count_in_full() -> None:
    priced, fleet, mean = admission(), queued(0.0), 0.2
    for ttft_s in (5.0, 60.0, 2.0, 0.5, 86_400.0, 1.0):
        priced.decide(asking(slo=Slo(ttft_s=ttft_s)), fleet, View())
        mean += 0.02 * (1.0 / ttft_s - mean)
    assert priced._budget == pytest.approx(mean, rel=1e-12)


def test_in_lasting_overload_the_queue_must_be_shorter() -> None:
    priced, fleet = admission(), queued(3.0)
    assert refused(priced, fleet, View()) == 0
    overload(priced, fleet)
    assert refused(priced, fleet, View()) > 0.5


def test_a_few_long_prompts_are_no_lasting_overload_but_many_short_ones_are() -> None:
    fleet = queued(3.0)
    by_chance, lasting = admission(), admission()
    overload(by_chance, fleet, requests=8, prompt_tokens=100_000)
    overload(lasting, fleet, requests=150, prompt_tokens=8_000)
    assert refused(by_chance, fleet, View()) == 0
    assert refused(lasting, fleet, View()) > 0.5


def test_reserved_kv_has_a_price_only_as_far_as_engines_use_it() -> None:
    fleet = queued(0.1)
    for candidate_ in fleet:
        candidate_.load.kv_reserved = 900_000
    priced = admission()
    priced.tick(NOW, fleet)
    assert refused(priced, fleet, View()) > 0.1
    for candidate_ in fleet:
        candidate_.load.timeline.kv_ratio = 0.5  # shared prefixes
    priced.tick(NOW, fleet)
    assert refused(priced, fleet, View()) == 0


def test_waiting_requests_count_as_queue() -> None:
    assert refused(admission(), queued(0.5), View(waiting=40, waiting_s=20.0)) > 0.9


def answering(step_s: float, count: int = 2) -> list[Candidate]:
    fleet = queued(0.0, count)
    for candidate_ in fleet:
        candidate_.load.decode_tokens, candidate_.load.decoding = 1000, 4
        candidate_.load.timeline.decode_s = step_s
    return fleet


def test_waiting_requests_count_at_the_pace_of_the_endpoints() -> None:
    priced, view = admission(), View(waiting=20, waiting_s=6.0)
    assert refused(priced, answering(0.0), view) == 0
    busy = answering(0.06)  # a third of the planned budget of 85 ms per token is left for prompts
    priced.tick(NOW, busy)
    assert refused(priced, busy, view) > 0.9


def test_what_is_left_for_prompts_follows_the_budget_per_token_that_requests_have() -> None:
    priced, fleet, view = admission(), answering(0.06), View(waiting=20, waiting_s=6.0)
    relaxed = asking(slo=Slo(tpot_s=1.0))
    priced.on_reserved(relaxed, Pick(fleet[0], 0, 0.0, 2, "test"))
    priced.tick(NOW, fleet)
    assert refused(priced, fleet, view) == 0


def test_in_overload_endpoints_that_were_given_too_much_hold_requests_back_from_others_too() -> (
    None
):
    priced, fleet = admission(), answering(0.01, count=4)
    assert priced.decide(asking(), fleet, View()) == Admit()
    for _ in range(40):
        priced.on_reserved(asking(20_000), Pick(fleet[0], 0, 0.0, 4, "test"))
    assert isinstance(priced.decide(asking(), fleet, View()), Wait)


def test_long_prompts_pay_more_and_still_have_their_chance() -> None:
    priced, fleet = admission(), queued(1.7)
    overload(priced, fleet)
    verdicts: dict[int, list[bool]] = {2000: [], 8000: [], 40_000: []}
    for seed in range(600):
        for prompt_tokens, verdicts_of_size in verdicts.items():
            verdicts_of_size.append(
                isinstance(priced.decide(asking(prompt_tokens, seed=seed), fleet, View()), Shed)
            )
    short, middle, long = (sum(shares) / len(shares) for shares in verdicts.values())
    assert short < middle < 0.2 < long < 0.9


def test_the_less_work_is_bent_the_more_a_long_prompt_pays_beyond_what_a_short_one_does() -> None:
    def shares(bend: float) -> tuple[float, float]:
        # Return the refused shares of prompts with 4,000 and with 40,000 tokens.
        #
        # `bend` is a parameter of the admission rule.
        priced, fleet = admission(bend=bend), queued(1.8)
        overload(priced, fleet)
        refused(priced, fleet, View(), prompt_tokens=4000)
        return refused(priced, fleet, View(), prompt_tokens=4000), refused(
            priced, fleet, View(), 40, prompt_tokens=40_000
        )

    gaps = [long - short for short, long in map(shares, (0.0, 0.5, 1.0))]
    assert gaps == sorted(gaps)
    assert abs(gaps[0]) < 0.1
    assert gaps[-1] > 0.2


def test_a_price_is_the_same_whatever_scale_the_weights_of_classes_have() -> None:
    shares = []
    for weight in (0.1, 1.0, 50.0):
        priced, fleet = admission(), queued(5.5)
        shares.append(refused(priced, fleet, View(), slo=Slo(weight=weight)))
    assert shares[0] == shares[1] == shares[2] > 0.1


@pytest.mark.parametrize("bend", [-0.1, 1.1, float("nan")])
def test_a_bend_that_favours_work_or_is_no_number_is_refused(bend: float) -> None:
    with pytest.raises(PolicyConfigError, match=r"priced\.bend: Expected `float`") as wrong:
        build_admission("priced", {"bend": bend})
    assert wrong.value.param == "bend"


def test_overload_begins_above_full_load() -> None:
    with pytest.raises(
        PolicyConfigError, match=r"overload \(1\.1\) must be greater than full_load \(1\.1\)"
    ):
        build_admission("priced", {"overload": 1.1})


def test_a_nested_parameter_is_judged_as_the_others_are() -> None:
    with pytest.raises(PolicyConfigError, match="contains unknown field `strat`"):
        build_admission("priced", {"sessions": {"strat": 0.7}})
    with pytest.raises(PolicyConfigError, match=r"start \(0\.95\) must be between least"):
        build_admission("priced", {"sessions": {"start": 0.95}})
    with pytest.raises(PolicyConfigError, match=r"soonest_s \(600\.0\) must not exceed latest_s"):
        build_admission("priced", {"returns": {"soonest_s": 600}})


def test_weight_priority_and_a_conversation_under_way_are_worth_more() -> None:
    priced, fleet = admission(), queued(5.5)
    plain = refused(priced, fleet, View())
    assert refused(priced, fleet, View(), tries=50, priority=3) < plain - 0.2
    assert refused(priced, fleet, View(), tries=50, slo=Slo(weight=10.0)) < plain - 0.2
    warm = [replace(asking(seed=seed), cached_by_slot=(600, 0)) for seed in range(400)]
    assert (
        sum(isinstance(priced.decide(candidate_, fleet, View()), Shed) for candidate_ in warm) / 400
        < plain
    )


def test_a_price_refusal_reports_queue_work_and_odds() -> None:
    verdict = shed(admission().decide(asking(), queued(12.0), View()))
    assert verdict.reason == "price"
    # No request has ended yet, so it is unknown whether the pool makes progress.
    assert verdict.retry_after_s is None
    assert "12.0 s of prompts are queued for each of 2 endpoints" in verdict.detail
    assert "beyond 4.0 s requests pay a price" in verdict.detail
    assert "s of work; one in" in verdict.detail


def test_retry_after_follows_the_measured_drain_and_spreads_returns() -> None:
    priced, fleet = admission(), queued(12.0)
    overload(priced, fleet, requests=50)
    view = View(drain=measured_rate())
    back = [
        verdict.retry_after_s
        for seed in range(60)
        if isinstance(
            verdict := priced.decide(asking(seed=seed, prompt=seed + 1), fleet, view), Shed
        )
    ]
    assert all(seconds is not None and 1.0 <= seconds <= 300.0 for seconds in back)
    assert len({round(seconds, 1) for seconds in back if seconds is not None}) > len(back) / 2


def test_a_scheduled_retry_is_admitted_and_an_early_one_gets_the_same_time_again() -> None:
    priced, fleet = admission(), queued(12.0)
    overload(priced, fleet, requests=50)
    view = View(drain=measured_rate())
    first = shed(priced.decide(asking(prompt=7), fleet, view))
    assert first.retry_after_s is not None
    early = shed(priced.decide(asking(prompt=7, now=NOW + 0.2), fleet, view))
    assert early.reason == "early"
    assert early.retry_after_s == pytest.approx(first.retry_after_s - 0.2)
    assert f"which is in {early.retry_after_s:.1f} s" in early.detail
    for candidate_ in fleet:
        candidate_.load.prefill_done_at += first.retry_after_s
    due = asking(prompt=7, now=NOW + first.retry_after_s)
    # Other requests wait, but capacity is reserved for this client's return.
    assert priced.decide(due, fleet, view) == Admit()
    assert priced.decide(asking(prompt=8, now=due.now), fleet, view) != Admit()


def test_no_retry_is_early_after_the_load_has_gone() -> None:
    priced, fleet = admission(), queued(12.0)
    overload(priced, fleet, requests=50)
    view = View(drain=measured_rate())
    assert shed(priced.decide(asking(prompt=7), fleet, view)).retry_after_s is not None
    assert not isinstance(priced.decide(asking(prompt=7, now=NOW + 0.2), queued(0.0), view), Shed)
    # The reservation of the request is used up.
    assert shed(priced.decide(asking(prompt=7, now=NOW + 0.3), fleet, view)).reason == "price"


def test_a_request_that_cannot_return_gets_no_retry_after_and_no_reservation() -> None:
    def told(probes: int) -> float | None:
        priced, fleet = admission(), queued(12.0)
        overload(priced, fleet)
        view = View(drain=measured_rate())
        for seed in range(probes):
            probe = replace(asking(40_000, seed=seed), can_return=False)
            assert shed(priced.decide(probe, fleet, view)).retry_after_s is None
        return shed(priced.decide(asking(prompt=7), fleet, view)).retry_after_s

    assert told(0) is not None
    assert told(50) == told(0)


def test_a_request_past_its_deadline_is_refused_with_both_times() -> None:
    verdict = shed(
        admission().decide(
            asking(deadline_s=NOW + 1.0), queued(3.0), View(busy=8, drain=measured_rate())
        )
    )
    assert verdict.reason == "deadline"
    assert verdict.detail.startswith(
        "The client gives up in 1.0 s and the first token is expected in 3."
    )


def test_a_late_waiting_request_is_refused_only_while_there_is_a_price() -> None:
    priced = admission()
    view = View(busy=8, waiting=3, waiting_s=30.0, is_new_arrival=False)
    late = replace(asking(now=NOW - 4.0), now=NOW)
    verdict = shed(priced.decide(late, queued(2.0), view))
    assert verdict.reason == "ttft"
    assert verdict.detail.startswith("The first token was due in 1.0 s and is expected in 2.")
    view.waiting_s = 0.1
    assert isinstance(priced.decide(late, queued(2.0), view), Wait)


def test_requests_wait_while_no_endpoint_would_begin_them_soon() -> None:
    priced = admission()
    assert isinstance(priced.decide(asking(), queued(2.0), View()), Wait)
    one_free = [*queued(2.0), candidate(2, prefill_done_at=NOW)]
    assert isinstance(priced.decide(asking(), one_free, View()), Admit)


def test_requests_wait_while_every_endpoint_is_ahead_of_its_pace() -> None:
    priced, fleet = admission(), queued(0.0, count=1)
    assert isinstance(priced.decide(asking(), fleet, View()), Admit)
    priced.on_reserved(asking(60_000), Pick(fleet[0], 0, 0.0, 1, "test"))
    assert not priced.is_calm
    assert isinstance(priced.decide(asking(), fleet, View()), Wait)
    assert isinstance(priced.decide(asking(now=NOW + 30.0), fleet, View()), Admit)


def test_a_new_session_enters_only_while_all_contexts_fit() -> None:
    priced, fleet = admission(), queued(0.0)  # the fleet holds 1.2 million tokens of KV
    for number in range(8):
        question = asking(100_000, session=f"s{number}")
        assert not isinstance(priced.decide(question, fleet, View()), Shed)
        priced.on_reserved(question, Pick(fleet[0], 0, 0.0, 2, "test"))
    verdict = shed(priced.decide(asking(100_000, session="new"), fleet, View()))
    assert verdict.reason == "session_memory"
    assert "8 active sessions use 800000 tokens" in verdict.detail
    assert "below 840000, 70% of the fleet's KV cache" in verdict.detail
    assert not isinstance(priced.decide(asking(100_000, session="s3"), fleet, View()), Shed)
    assert not isinstance(priced.decide(asking(100_000), fleet, View()), Shed)


def test_the_last_request_of_a_session_makes_room_for_a_new_one() -> None:
    priced, fleet = admission(), queued(0.0)
    for number in range(8):
        question = asking(100_000, session=f"s{number}")
        priced.on_reserved(question, Pick(fleet[0], 0, 0.0, 2, "test"))
    new = asking(100_000, session="new")
    last = asking(100_000, session="s3", session_hints=SessionHints(is_last=True)).request
    priced.on_ended(last, RequestOutcome(NOW + 1, status="dropped"))
    assert shed(priced.decide(new, fleet, View())).reason == "session_memory"
    priced.on_reserved(asking(100_000, session="s3"), Pick(fleet[0], 0, 0.0, 2, "test"))
    priced.on_ended(last, RequestOutcome(NOW + 2, 0.1, 0.01, 100, 0))
    assert not isinstance(priced.decide(new, fleet, View()), Shed)


def test_a_session_recognised_by_its_prompt_enters_while_the_prompt_is_cached() -> None:
    priced, fleet = admission(), queued(0.0)
    for number in range(8):
        question = asking(100_000, session=f"s{number}")
        priced.on_reserved(question, Pick(fleet[0], 0, 0.0, 2, "test"))
    inferred = asking(100_000, session="grown", session_source=INFERRED_SESSION)
    assert shed(priced.decide(inferred, fleet, View())).reason == "session_memory"
    cached = replace(inferred, cached_by_slot=(60_000, 0))
    assert not isinstance(priced.decide(cached, fleet, View()), Shed)
    named = replace(cached, request=replace(cached.request, session_source="session-id"))
    assert shed(priced.decide(named, fleet, View())).reason == "session_memory"


def test_a_tenant_within_its_share_pays_no_price_for_others() -> None:
    priced, fleet = admission(), queued(6.0)
    overload(priced, fleet, "loud")
    priced.on_reserved(asking(tenant="quiet"), Pick(fleet[0], 0, 0.0, 2, "test"))
    priced.tick(NOW, fleet)
    assert refused(priced, fleet, View(), tenant="loud") > 0.5
    assert refused(priced, fleet, View(), tenant="quiet") == 0


def test_the_fast_path_is_open_only_while_the_admission_is_calm() -> None:
    priced, idle = admission(), queued(0.0)
    priced.tick(NOW, idle)
    assert priced.is_calm
    priced.tick(NOW, queued(2.0))
    assert not priced.is_calm
    priced.tick(NOW + 60, idle)
    assert priced.is_calm
    priced.on_reserved(asking(session="s"), Pick(idle[0], 0, 0.0, 2, "test"))
    assert not priced.is_calm
    priced.on_ended(asking(session="s").request, RequestOutcome(NOW + 1, 0.1, 0.01, 100, 0))
    priced.tick(NOW + 61, idle)
    assert not priced.is_calm  # the client of session s may return
    priced.tick(NOW + 400, idle)
    assert priced.is_calm


def test_no_request_waits_without_an_endpoint() -> None:
    assert shed(admission().decide(asking(), [], View(capacity=0))).reason == "no_capacity"
    down = [candidate(0, is_available=False)]
    assert shed(admission().decide(asking(), down, View(capacity=24))).reason == "no_capacity"


def test_equal_questions_get_equal_answers_from_an_equal_seed() -> None:
    rng, other = Random(3), Random(3)
    verdicts = [
        admission().decide(
            replace(asking(), rng=candidate_), queued(5.5), View(drain=measured_rate())
        )
        for candidate_ in (rng, other)
    ]
    assert verdicts[0] == verdicts[1]


NO_PROMISE = replace(STANDARD, is_promised=False)


def test_nothing_is_refused_for_a_budget_that_no_operator_or_client_set() -> None:
    priced, fleet = admission(), queued(60.0)
    overload(priced, fleet)
    verdicts = [
        priced.decide(asking(seed=seed, slo=NO_PROMISE), fleet, View(drain=measured_rate()))
        for seed in range(50)
    ]
    assert verdicts == [Admit()] * 50
    waiting = View(drain=measured_rate(), is_new_arrival=False)
    late = asking(slo=replace(NO_PROMISE, ttft_s=0.001))
    assert priced.decide(late, fleet, waiting) == Admit()


def test_without_a_budget_the_clients_own_deadline_still_refuses() -> None:
    ask = asking(deadline_s=NOW + 1.0, slo=NO_PROMISE)
    assert shed(admission().decide(ask, queued(3.0), View())).reason == "deadline"


def test_a_request_without_a_budget_waits_where_others_have_one() -> None:
    priced, fleet = admission(), queued(60.0)
    overload(priced, fleet)
    assert isinstance(priced.decide(asking(), fleet, View(drain=measured_rate())), Shed)
    assert isinstance(priced.decide(asking(slo=NO_PROMISE), fleet, View()), Wait)
