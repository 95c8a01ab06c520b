"""Tests of refusing new sessions whose contexts do not fit the engines' KV memory."""

from __future__ import annotations

from random import Random

from policies.admission.adaptive_session_limit import SessionGate
from policies.admission.admission_policy import Admit, RequestOutcome, Shed, Wait
from policies.admission.cap_admission import CapAdmission, CapParams, SessionCap
from policies.admission.session_refusals import ON_EVIDENCE
from policies.admission.wait_queue import WaitQueue, WaitQueueLimits
from policies.routing_types import Candidate, Pick, Request, RoutingQuery
from tests.unit.policies.builders import candidate

LIMITED = SessionGate(start=0.7)


def pool(gate: SessionGate, kv_tokens: int | None = 1000) -> tuple[WaitQueue[int], Candidate]:
    member = candidate(0, cap=4)
    member.load.kv_tokens = kv_tokens
    queue: WaitQueue[int] = WaitQueue(SessionCap(gate), WaitQueueLimits())
    queue.refresh((member,))
    return queue, member


def query(session: str, now: float = 0.0, prompt_tokens: int = 600) -> RoutingQuery:
    request = Request(session or "plain", "m", "t", prompt_tokens, 1, True, session=session)
    return RoutingQuery(request, now, Random(1))


def serve(queue: WaitQueue[int], member: Candidate, session: str) -> None:
    asked = query(session)
    assert isinstance(queue.arrive(asked, (member,), 1), Admit)
    queue.on_reserved(asked, Pick(member, 0, 0.0, 1, "cap", [0.0], [member]))
    queue.release(asked.request, RequestOutcome(1.0, ttft_s=0.1, output_tokens=1))


def test_a_session_that_does_not_fit_is_refused_with_the_numbers() -> None:
    queue, member = pool(LIMITED)
    serve(queue, member, "a")
    verdict = queue.arrive(query("b", 2.0), (member,), 2)
    assert isinstance(verdict, Shed)
    assert verdict.reason == "session_memory"
    assert "1 active sessions use 601 tokens" in verdict.detail
    assert "below 700" in verdict.detail


def test_active_sessions_and_requests_without_one_are_not_refused() -> None:
    queue, member = pool(LIMITED)
    serve(queue, member, "a")
    for session in ("a", ""):
        assert isinstance(queue.arrive(query(session, 2.0), (member,), 2), Admit)


def test_no_session_is_refused_where_an_engine_does_not_report_its_memory() -> None:
    queue, member = pool(LIMITED, kv_tokens=None)
    serve(queue, member, "a")
    assert isinstance(queue.arrive(query("b", 2.0), (member,), 2), Admit)


def test_without_evidence_requests_enter_without_being_judged() -> None:
    queue, member = pool(ON_EVIDENCE)
    serve(queue, member, "a")
    queue.tick(1.0)
    assert queue.try_enter()
    assert isinstance(queue.arrive(query("b", 2.0), (member,), 2), Admit)


def test_a_full_pool_lets_a_session_that_fits_wait() -> None:
    queue, member = pool(LIMITED)
    for _ in range(4):
        assert queue.try_enter() or isinstance(queue.arrive(query(""), (member,), 1), Admit)
    assert isinstance(queue.arrive(query("a", 2.0, 100), (member,), 2), Wait)


def test_the_limit_can_be_turned_off() -> None:
    assert type(CapParams(sessions=None).build()) is CapAdmission


def test_an_idle_fleet_does_not_refuse_all_sessions_until_ended_ones_expire() -> None:
    queue, member = pool(ON_EVIDENCE)
    serve(queue, member, "a")
    limited = queue.admission
    assert isinstance(limited, SessionCap)
    limited.sessions.memory_share = 0.7
    member.load.waiting = 3
    assert isinstance(queue.arrive(query("b", 2.0), (member,), 2), Shed)
    member.load.waiting = 0
    assert isinstance(queue.arrive(query("c", 2.0), (member,), 3), Admit)
    assert isinstance(queue.arrive(query("d", 2.1), (member,), 4), Shed)
    assert isinstance(queue.arrive(query("d", 4.0), (member,), 5), Admit)
