"""Property tests of the price of serving a request at an endpoint, which is its expected harm.

The price never falls when there is less free memory, and never rises when more of the prompt is
cached.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.endpoint_load import EndpointLoad
from policies.policy_types import DECODE_PHASE, WHOLE_REQUEST, PhaseShare
from policies.pricing.endpoint_price import PricedPolicy, PriceScorer
from policies.routing_types import Candidate, Endpoint, Request, RoutingQuery, Slo

share = st.floats(0.0, 1.0)
tokens = st.integers(0, 200_000)
slos = st.builds(Slo, st.just("any"), st.floats(0.05, 60.0), st.floats(0.005, 2.0))
requests = st.builds(
    Request, *map(st.just, ("id", "m", "t")), tokens, st.integers(0, 4000), slo=slos
)
parts = st.sampled_from(
    (WHOLE_REQUEST, DECODE_PHASE, PhaseShare(decodes=0.0), PhaseShare(decodes=0.0, transfer_s=1.0))
)
weight = st.floats(0.0, 9.0)
prices = st.builds(
    PriceScorer,
    st.builds(
        PricedPolicy,
        st.floats(1.0, 3.0),
        st.floats(0.0, 3.0),
        weight,
        st.floats(1.0, 9.0),
        *[weight] * 4,
        st.floats(1.0, 4.0),
    ),
)


WORSE: dict[str, st.SearchStrategy[float]] = {
    "prefill_done_at": st.floats(0.0, 100.0),
    "kv_reserved": st.integers(0, 10**6),
    "kv_used_tokens": st.integers(0, 10**6),
    "in_flight": st.integers(0, 300),
    "free_kv_tokens": st.integers(-(10**6), 0),
    "eviction_regret": share,
}
"""Changes of an endpoint's numbers that must not make it cheaper."""


@st.composite
def candidates(draw: st.DrawFn, slot: int = 0) -> Candidate:
    load = EndpointLoad(slot)
    load.prefill_done_at, load.fixed_ttft_s = draw(st.floats(0.0, 200.0)), draw(share)
    load.prefill_s_per_token, load.attention_s_per_pair = (
        draw(st.floats(0.0, 1e-3)),
        draw(st.floats(0.0, 1e-7)),
    )
    load.decode_s_per_token, load.decode_s_per_sequence = (
        draw(st.floats(0.0, 1.0)),
        draw(st.floats(0.0, 1e-3)),
    )
    load.decode_s_per_context_token, load.eviction_regret = draw(st.floats(0.0, 1e-6)), draw(share)
    load.kv_tokens, load.kv_reserved = (
        draw(st.one_of(st.none(), st.floats(1e3, 1e7))),
        draw(st.integers(0, 10**6)),
    )
    load.kv_used_tokens = draw(st.integers(0, 10**6))
    load.slots = draw(st.one_of(st.just(inf), st.integers(1, 300)))
    load.answers = load.in_flight = draw(st.integers(0, 200))
    load.expected_tokens = load.answers * draw(st.integers(0, 4000))
    load.free_kv_tokens, load.s_per_freed_kv_token = (
        draw(st.one_of(st.just(inf), st.floats(-1e6, 1e6))),
        draw(st.floats(0.0, 1e-3)),
    )
    load.external_requests, load.waiting = (
        draw(st.integers(0, 9)),
        draw(st.one_of(st.none(), st.integers(0, 9))),
    )
    load.scraped_at, load.kv_usage = (
        draw(st.sampled_from((None, 60.0, 99.0))),
        draw(st.one_of(st.none(), share)),
    )
    return Candidate(Endpoint("tp", "http://127.0.0.1:9000", "pool", "m"), load)


def price(by: PriceScorer, request: Request, one: Candidate, held: int, part: PhaseShare) -> float:
    (quote,) = by.prices(RoutingQuery(request, 100.0, Random(1), [held]), [one], part)
    return quote


def never_cheaper(
    by: PriceScorer,
    request: Request,
    one: Candidate,
    held: float,
    part: PhaseShare,
    worsen: Callable[[EndpointLoad], None],
) -> None:
    cached = int(held * request.prompt_tokens)
    before = price(by, request, one, cached, part)
    worsen(one.load)
    assert price(by, request, one, cached, part) >= before - 1e-9 * abs(before)


@pytest.mark.parametrize("number", WORSE)
@given(prices, requests, candidates(), share, parts, st.data())
def test_more_backlog_reserved_memory_or_regret_or_less_free_memory_is_never_cheaper(
    number: str,
    by: PriceScorer,
    request: Request,
    one: Candidate,
    held: float,
    part: PhaseShare,
    data: st.DataObject,
) -> None:
    if number == "prefill_done_at":  # answers that a queue has made late have less to lose
        one.load.answers = one.load.expected_tokens = 0

    def worsen(load: EndpointLoad) -> None:
        setattr(load, number, getattr(load, number) + data.draw(WORSE[number]))

    never_cheaper(by, request, one, held, part, worsen)


@given(prices, requests, candidates(), share, share, parts)
def test_more_of_the_prompt_cached_is_never_dearer(
    by: PriceScorer, request: Request, one: Candidate, some: float, more: float, part: PhaseShare
) -> None:
    low, high = sorted(int(share * request.prompt_tokens) for share in (some, more))
    dear = price(by, request, one, low, part)
    assert price(by, request, one, high, part) <= dear + 1e-9 * abs(dear)


@given(prices, requests, candidates(), share, parts, st.integers(1, 200))
def test_more_answers_under_way_of_the_same_length_are_never_cheaper(
    by: PriceScorer, request: Request, one: Candidate, held: float, part: PhaseShare, times: int
) -> None:
    def worsen(load: EndpointLoad) -> None:
        load.answers *= times
        load.expected_tokens *= times

    never_cheaper(by, request, one, held, part, worsen)


@given(prices, requests, candidates(), share, parts)
def test_a_price_is_a_finite_number_not_below_zero_and_the_sum_of_its_parts(
    by: PriceScorer, request: Request, one: Candidate, held: float, part: PhaseShare
) -> None:
    question = RoutingQuery(request, 100.0, Random(1), [int(held * request.prompt_tokens)])
    (quote,) = by.prices(question, [one], part)
    assert isfinite(quote)
    assert quote >= 0.0
    assert quote == pytest.approx(by.explain(question, [one], 0, part).total, rel=1e-6, abs=1e-12)
