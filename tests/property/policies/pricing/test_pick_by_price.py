"""Property test of a short cut that finds the cheapest endpoint without complete prices of all.

It must choose the same endpoint as a complete comparison, after any history of the endpoints.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import load_ledger, scraped_load
from policies.endpoint_load import EndpointLoad, join_ranks
from policies.load_ledger import LoadReservation
from policies.pricing.endpoint_price import PricedPolicy, PriceScorer
from policies.pricing.rank_choice import lags_behind_best_rank, prefill_work
from policies.routing_types import Request, RoutingQuery, Slo
from tests.unit.policies.builders import candidate

SLOS = (Slo(), Slo("tight", 0.5, 0.02), Slo("loose", 60.0, 1.0))
LENGTHS = (1, 4, 60, 400, 3000)


class Fleet:
    def __init__(self, size: int, ranks: int, rng: Random) -> None:
        # The steps of the first `ranks` endpoints end together.
        self.rng, self.now = rng, 100.0
        self.candidates = [candidate(slot) for slot in range(size)]
        join_ranks([one.load for one in self.candidates[:ranks]])
        self.reservations: list[LoadReservation] = []

    def request(self) -> Request:
        rng = self.rng
        prompt, length = rng.choice((1, 300, 5000, 40_000)), rng.choice(LENGTHS)
        return Request("id", "m", "t", prompt, length, stream=True, slo=rng.choice(SLOS))

    def act(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.001, 0.03, 0.5, 4.0))
        load = rng.choice(self.candidates).load
        event = rng.randrange(6)
        if event < 2:
            sees_first_token = rng.random() < 0.8
            request, cached = self.request(), rng.choice((0, 200))
            reserved = load_ledger.reserve(load, request, cached, self.now, sees_first_token)
            self.reservations.append(reserved)
        elif event == 2 and self.reservations:
            rng.choice(self.reservations).on_first_token(self.now)
        elif event == 3 and self.reservations:
            ended = self.reservations.pop(rng.randrange(len(self.reservations)))
            ended.finish(self.now, rng.choice((*LENGTHS, None)))
        elif event == 4:
            self.scrape(load)
        else:
            load.eviction_regret = rng.choice((0.0, 0.5))

    def scrape(self, load: EndpointLoad) -> None:
        rng = self.rng
        numbers = rng.randrange(9), rng.randrange(3), rng.choice((0.0, 0.3, 0.99))
        scraped_load.record_scrape(load, *numbers, 60_000, self.now)

    def ask(self) -> RoutingQuery:
        request = self.request()
        cached = [self.rng.choice((0, 0, request.prompt_tokens // 2)) for _ in self.candidates]
        return RoutingQuery(request, self.now, self.rng, cached)


@given(seed=st.integers(0, 1 << 32), size=st.integers(1, 8), ranks=st.sampled_from((0, 2, 8)))
@settings(max_examples=60, deadline=None)
def test_the_best_score_is_that_of_the_endpoint_with_the_lowest_explained_price(
    seed: int, size: int, ranks: int
) -> None:
    fleet, by = (
        Fleet(size, ranks, Random(seed)),
        PriceScorer(PricedPolicy(measured_share=0.0)),
    )
    for _ in range(60):
        fleet.act()
        query, candidates = fleet.ask(), fleet.candidates
        scores = by.scores(query, candidates)
        complete = by.prices(query, candidates)
        explained = [by.explain(query, candidates, index).total for index in range(size)]
        assert complete == pytest.approx(explained, rel=1e-6, abs=1e-12)
        # Of the ranks that step together, only the best by work may have the best price.
        lags = lags_behind_best_rank(candidates, prefill_work(5.0)(query, candidates))
        lowest = min(price for price, lag in zip(complete, lags, strict=True) if not lag)
        assert max(scores) == -lowest
        for score, price, lag in zip(scores, complete, lags, strict=True):
            assert (score == -lowest) == (not lag and price == lowest)
            assert -score <= price or lag
