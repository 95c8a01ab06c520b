"""Tests of where the policy `priced` begins sessions, and of what a move costs their turns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from policies.engine.step_time import SpeedFactor, UsualSpeeds
from policies.pricing.endpoint_price import PricedPolicy, PriceScorer
from policies.pricing.session_placement import REMEMBERED, SessionStarts
from policies.routing_types import INFERRED_SESSION, Candidate, RoutingQuery
from tests.unit.policies.builders import ask, outlook


def turn(session: str, number: int, cached: Sequence[int] = ()) -> RoutingQuery:
    question = ask(9000, 300, cached=cached)
    request = replace(question.request, id=f"{session} {number}", session=session)
    return replace(question, request=request)


def cheapest(by: PriceScorer, question: RoutingQuery, fleet: Sequence[Candidate]) -> int:
    scores = by.scores(question, fleet)
    return scores.index(max(scores))


def crowded_and_waiting() -> list[Candidate]:
    # The first endpoint has many answers and no queue, the second a queue and no answers.
    many = {"answers": 60, "expected_tokens": 3_000, "in_flight": 60, "decoding": 60}
    return [outlook(0, **many), outlook(1, prefill_done_at=101.0)]


def test_a_session_begins_where_it_is_served_best_whatever_it_costs_others() -> None:
    by, fleet = (
        PriceScorer(PricedPolicy(measured_share=0.0)),
        crowded_and_waiting(),
    )
    assert cheapest(by, turn("", 1), fleet) == 1
    assert cheapest(by, turn("a", 1), fleet) == 0
    assert cheapest(by, turn("a", 1), fleet) == 0, "another attempt of the same request"
    assert cheapest(by, turn("a", 2), fleet) == 1


def test_the_best_score_of_a_sessions_beginning_is_a_price() -> None:
    by, fleet, question = (
        PriceScorer(PricedPolicy(measured_share=0.0)),
        crowded_and_waiting(),
        turn("a", 1),
    )
    first, second = by.scores(question, fleet)
    assert first == pytest.approx(-by.explain(question, fleet, 0).total)
    assert second < first


def test_a_turn_leaves_its_prefix_only_if_that_saves_more_than_a_single_request_needs() -> None:
    fleet = [outlook(0, prefill_done_at=103.5), outlook(1)]
    by, cached = PriceScorer(PricedPolicy(measured_share=0.0)), [8192]
    assert cheapest(by, turn("", 1, cached), fleet) == 1
    by.scores(turn("a", 1, cached), fleet)
    assert cheapest(by, turn("a", 2, cached), fleet) == 0
    fleet[0].load.prefill_done_at = 160.0
    assert cheapest(by, turn("a", 3, cached), fleet) == 1


def test_what_a_move_costs_is_part_of_the_explained_work() -> None:
    by, fleet = (
        PriceScorer(PricedPolicy(measured_share=0.0)),
        [outlook(0), outlook(1)],
    )
    alone = by.terms(turn("", 1, [8192]), fleet)
    one, other = by.terms(turn("a", 2, [8192]), fleet)
    assert one == alone[0]
    assert other["work"] - alone[1]["work"] > 10 * alone[1]["work"] > 0.0
    assert by.prices(turn("a", 2, [8192]), fleet) == pytest.approx(
        [sum(one.values()), sum(other.values())]
    )


def test_a_session_that_began_before_speeds_were_measured_does_not_begin_again() -> None:
    by, fleet = PriceScorer(PricedPolicy()), crowded_and_waiting()
    by.scores(turn("a", 1), fleet)
    for one in fleet:
        belief = one.load.belief
        known = SpeedFactor(1.0, 0.01)
        belief.speeds = UsualSpeeds(known, belief.speeds.pairs, known)
    assert cheapest(by, turn("b", 1), fleet) == 0
    assert cheapest(by, turn("a", 2), fleet) == 1


def test_sessions_without_a_name_never_begin() -> None:
    starts, request = SessionStarts(), turn("a", 1).request
    assert not starts.is_first(replace(request, session=""))
    assert not starts.is_first(replace(request, session_source=INFERRED_SESSION))


def test_the_oldest_sessions_are_forgotten() -> None:
    starts, request = SessionStarts(), turn("a", 1).request
    for number in range(REMEMBERED + 1):
        assert starts.is_first(replace(request, session=str(number)))
    assert not starts.is_first(replace(request, session="1", id="next"))
    assert starts.is_first(replace(request, session="0", id="next"))
