"""Tests of admission rules that other projects have published, at their thresholds."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from policies.admission.admission_policy import (
    Admission,
    Admit,
    RequestOutcome,
    Shed,
    Verdict,
    Wait,
)
from policies.admission_registry import build_admission
from policies.policy_registry import PolicyConfigError
from policies.routing_types import Candidate, Pick, Request, RoutingQuery, SessionHints, Slo
from tests.unit.policies.builders import View, ask, candidate, shed
from tests.unit.policies.published.test_published import PACE

PUBLISHED = ("early_rejection", "gie_saturation", "probabilistic", "session_pause")


def judge(
    admission: Admission, candidates: list[Candidate], view: View | None = None, **fields: object
) -> Verdict:
    seed = int(fields.pop("seed", 1))  # type: ignore[call-overload]
    question = ask(seed=seed, now=float(fields.pop("now", 100.0)))  # type: ignore[arg-type]
    return admission.decide(
        replace(question, request=replace(question.request, **fields)),
        candidates,
        view or View(0, 24, 0),
    )


def refused(verdict: Verdict) -> Shed:
    assert shed(verdict).detail.endswith((".", "s"))
    return shed(verdict)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_calm_pool_admits_a_full_pool_queues_and_an_empty_pool_refuses(name: str) -> None:
    admission, fleet = build_admission(name, {}), [candidate(0, **PACE)]
    assert judge(admission, fleet) == Admit()
    assert judge(admission, fleet, View(24, 24, 0)) == Wait(10.0)
    assert (
        refused(judge(admission, [candidate(0, is_available=False)], View(0, 0, 0))).reason
        == "no_capacity"
    )
    assert not admission.is_calm


def test_early_rejection_refuses_requests_with_a_late_first_token() -> None:
    admission, fleet = (
        build_admission("early_rejection", {}),
        [candidate(0, prefill_done_at=104.8, **PACE)],
    )
    # The prompt ends after 4.8 + 0.1 s, within the budget of 5 s.
    assert judge(admission, fleet) == Admit()
    fleet[0].load.prefill_done_at = 105.4
    late = refused(judge(admission, fleet))
    assert late.reason == "ttft"
    assert late.retry_after_s == pytest.approx(0.5)
    assert "5.5 s" in late.detail
    assert judge(admission, [*fleet, candidate(1, **PACE)]) == Admit()


def test_early_rejection_takes_its_margin_of_the_slo() -> None:
    half, fleet = (
        build_admission("early_rejection", {"margin": 0.5}),
        [candidate(0, prefill_done_at=103.0, **PACE)],
    )
    assert refused(judge(half, fleet)).reason == "ttft"
    assert judge(half, fleet, slo=Slo("batch", 30.0, 1.0)) == Admit()


def test_early_rejection_refuses_requests_with_a_high_tpot() -> None:
    admission, fleet = build_admission("early_rejection", {}), [candidate(0, **PACE)]
    fleet[0].load.decode_s_per_token = 0.11
    assert refused(judge(admission, fleet)).reason == "tpot"
    assert judge(admission, fleet, slo=Slo("batch", 5.0, 0.2)) == Admit()


def test_early_rejection_decides_at_the_door_only() -> None:
    view = View(0, 24, 1)
    view.is_new_arrival = False
    assert (
        judge(
            build_admission("early_rejection", {}),
            [candidate(0, prefill_done_at=900.0, **PACE)],
            view,
        )
        == Admit()
    )


def test_gie_refuses_low_priorities_from_a_mean_saturation_of_one() -> None:
    admission = build_admission("gie_saturation", {})
    fleet = [
        candidate(0, waiting=6, kv_usage=0.1, scraped_at=99.0),
        candidate(1, waiting=3, scraped_at=99.0),
    ]
    assert judge(admission, fleet, priority=-1) == Admit()  # (6 / 5 + 3 / 5) / 2
    fleet[1].load.kv_usage = 0.64
    full = refused(judge(admission, fleet, priority=-1))
    assert full.reason == "saturated"
    assert "1.00" in full.detail
    assert judge(admission, fleet, priority=0) == Admit()


def test_gie_counts_our_own_queue_when_the_scrape_is_old() -> None:
    admission = build_admission("gie_saturation", {})
    stale = candidate(0, waiting=0, scraped_at=90.0, in_flight=9, decoding=4)
    assert isinstance(judge(admission, [stale], priority=-1), Shed)
    stale.load.scraped_at = 99.0
    assert judge(admission, [stale], priority=-1) == Admit()


def test_the_probabilistic_admitter_sheds_along_a_ramp_of_the_fifth_power() -> None:
    admission = build_admission("probabilistic", {})

    def shed_of(saturation: float, priority: int) -> int:
        fleet = [candidate(0, kv_usage=0.8 * saturation, waiting=0, scraped_at=99.0)]
        counter = Counter(
            type(judge(admission, fleet, seed=seed, priority=priority)) for seed in range(400)
        )
        return counter[Shed]

    assert shed_of(0.1, -1) <= 5  # 0.3 %
    assert shed_of(0.23, -1) == pytest.approx(77, abs=25)  # 19 %
    assert shed_of(0.33, -1) == 400
    assert shed_of(2.0, 0) == 0

    # Sessions: an engine with room for 10,000 tokens


class Agents:
    def __init__(self, engines: int = 1, **params: object) -> None:
        self.admission = build_admission("session_pause", params)
        self.fleet = [candidate(slot, kv_tokens=10_000.0, **PACE) for slot in range(engines)]

    def ask(self, session: str, tokens: int, now: float) -> RoutingQuery:
        question = ask(now=now)
        return replace(
            question, request=replace(question.request, session=session, prompt_tokens=tokens)
        )

    def comes(self, session: str, tokens: int, now: float, slot: int = 0) -> Verdict:
        question = self.ask(session, tokens, now)
        verdict = self.admission.decide(question, self.fleet, View(0, 24, 0))
        if isinstance(verdict, Admit):
            self.admission.on_reserved(question, Pick(self.fleet[slot], 0, 0.0, 1, "test"))
        return verdict

    def ends(
        self, session: str, tokens: int, now: float, output: int = 0, ended: str = "served"
    ) -> None:
        request: Request = self.ask(session, tokens, now).request
        self.admission.on_ended(request, RequestOutcome(now, output_tokens=output, status=ended))

    def turn(self, session: str, tokens: int, now: float, slot: int = 0) -> None:
        assert self.comes(session, tokens, now, slot) == Admit()
        self.ends(session, tokens, now)

    def tick(self, now: float) -> None:
        self.admission.tick(now, self.fleet)


def test_a_new_session_enters_only_where_its_context_fits() -> None:
    agents = Agents(engines=2)
    agents.turn("a", 6000, 1.0, slot=0)
    agents.turn("b", 6000, 1.0, slot=1)
    assert refused(agents.comes("c", 3801, 1.0)).reason == "session_paused"
    # A small new session is not admitted before the one that was refused.
    assert refused(agents.comes("d", 10, 1.0)).reason == "session_paused"
    assert Agents().comes("large", 9900, 1.0) == Admit()


def test_an_active_session_continues_however_full_memory_is() -> None:
    agents = Agents()
    agents.turn("a", 5000, 1.0)
    agents.turn("b", 4500, 1.0)
    assert agents.comes("a", 8000, 2.0) == Admit()


def test_above_the_threshold_the_smallest_silent_sessions_pause_down_to_the_target() -> None:
    agents = Agents()
    for name, tokens in (("a", 1500), ("b", 2500), ("c", 5400)):
        agents.turn(name, tokens, 1.0)  # 9700 with 100 each
    agents.tick(2.0)
    assert isinstance(agents.comes("a", 1500, 2.5), Shed)  # 8100 are left, above 8000
    assert isinstance(agents.comes("b", 2500, 2.5), Shed)
    assert agents.comes("c", 5400, 2.5) == Admit()


def test_no_session_pauses_below_the_threshold() -> None:
    agents = Agents()
    agents.turn("a", 4000, 1.0)
    agents.turn("b", 5300, 1.0)  # 9500
    agents.tick(2.0)
    assert agents.comes("a", 4000, 3.0) == Admit()


def test_a_session_being_answered_pauses_when_its_answer_is_whole() -> None:
    agents = Agents()
    agents.turn("b", 400, 1.0)
    assert agents.comes("a", 9400, 1.0) == Admit()
    agents.tick(2.0)
    assert agents.comes("a", 9400, 2.0) == Admit()
    agents.ends("a", 9400, 3.0)
    agents.ends("a", 9400, 3.5)
    assert isinstance(agents.comes("a", 9400, 4.0), Shed)


def test_a_paused_session_resumes_when_others_have_been_silent_for_some_seconds() -> None:
    agents = Agents()
    agents.turn("a", 4000, 1.0)
    assert agents.comes("b", 5800, 1.0) == Admit()
    agents.tick(2.0)  # 10,000 tokens are in use: a is paused, and b is being answered
    assert isinstance(agents.comes("a", 4000, 3.0), Shed)
    agents.tick(7.0)
    assert isinstance(agents.comes("a", 4000, 8.0), Shed)  # 5900 + 4100 are above 8500
    agents.ends("b", 5800, 8.0)
    agents.tick(12.0)  # four half-lives later b counts for a sixteenth
    assert agents.comes("a", 4000, 13.0) == Admit()


def test_a_refused_session_gets_the_time_of_the_next_decision() -> None:
    agents = Agents()
    agents.tick(1.0)
    agents.turn("a", 9800, 1.0)
    assert refused(agents.comes("b", 500, 2.5)).retry_after_s == pytest.approx(3.5)


def test_after_its_timeout_a_paused_session_resumes_in_any_case() -> None:
    agents = Agents(resume_timeout_s=60.0)
    assert agents.comes("a", 9000, 1.0) == Admit()
    assert isinstance(agents.comes("b", 2000, 2.0), Shed)
    for now in range(5, 60, 5):
        agents.tick(float(now))
        assert isinstance(agents.comes("b", 2000, now + 1.0), Shed)
    agents.tick(65.0)
    assert agents.comes("b", 2000, 66.0) == Admit()


def test_idle_sessions_are_forgotten() -> None:
    agents = Agents()
    agents.turn("a", 9800, 1.0)
    assert isinstance(agents.comes("b", 500, 2.0), Shed)
    agents.tick(1802.0)
    assert agents.comes("c", 9800, 1803.0) == Admit()


def test_a_session_that_has_ended_makes_room_at_once() -> None:
    agents = Agents()
    agents.turn("a", 9000, 0.0)
    assert refused(agents.comes("b", 3000, 1.0)).reason == "session_paused"
    assert agents.comes("a", 9000, 2.0) == Admit()
    last = replace(agents.ask("a", 9000, 3.0).request, session_hints=SessionHints(is_last=True))
    agents.admission.on_ended(last, RequestOutcome(3.0, output_tokens=1))
    agents.tick(20.0)
    assert agents.comes("b", 3000, 20.0) == Admit()


def test_requests_without_session_or_known_capacity_enter() -> None:
    agents = Agents()
    agents.turn("a", 9900, 1.0)
    assert agents.comes("", 9900, 1.0) == Admit()
    agents.fleet[0].load.kv_tokens = None
    assert agents.comes("b", 9900, 1.0) == Admit()


def test_sessions_remembered_are_bounded() -> None:
    agents = Agents(most_sessions=3)
    for number in range(9):
        agents.turn(f"{number}", 100, float(number))
    assert len(agents.admission._programs) == 3  # type: ignore[attr-defined]
    assert agents.admission._used == {0: 600.0}  # type: ignore[attr-defined]


def test_refused_sessions_are_bounded_and_displace_no_active_ones() -> None:
    agents = Agents(most_sessions=3)
    agents.turn("a", 9900, 0.0)
    for number in range(9):
        assert isinstance(agents.comes(f"{number}", 5000, 1.0), Shed)
    assert len(agents.admission._programs) == 3  # type: ignore[attr-defined]
    assert agents.comes("a", 9900, 2.0) == Admit()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gie_saturation", {"queue_depth": 0}),
        ("probabilistic", {"kv_usage": 0}),
        ("session_pause", {"acting_decay_tau_s": 0}),
    ],
)
def test_a_parameter_that_would_be_divided_by_is_refused_when_it_is_zero(
    name: str, params: dict[str, object]
) -> None:
    with pytest.raises(PolicyConfigError, match=rf"{name}\.\w+: Expected `float` >= 1e-09"):
        build_admission(name, params)
