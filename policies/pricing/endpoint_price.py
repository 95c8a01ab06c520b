"""The price of serving a request at an endpoint: the expected loss in SLO attainment.

Contains the terms of the price, the policy `priced` that picks the cheapest endpoint, and prices of
single phases, which splitting adds up (split_decision.py). price_loop.py computes the prices of a
pick. Time estimates are in expected_latency.py and engine_model_updates.py.
docs/how-the-price-works.md explains the price without code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from operator import attrgetter, neg

import msgspec

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.endpoint_load import EndpointLoad
from policies.latency.expected_latency import backlog_s, is_first_token_late, room_s
from policies.param_types import Factor, Fraction, NonNegative
from policies.policy_types import (
    WHOLE_REQUEST,
    LinkLoad,
    PhaseShare,
    Policy,
    Ranking,
    WeightedScorer,
)
from policies.pricing.pool_speeds import PoolSpeeds
from policies.pricing.price_loop import (
    FULLEST,
    UNKNOWN_KV_TOKENS,
    USUAL_REQUEST,
    PriceLoop,
    Row,
    is_fresh,
    is_turn,
    joint_backlog_s,
    joint_work_s,
    most_cached,
    patience_s,
    prefill_share,
    prefill_shares,
    slot_loss,
    slot_wait_s,
    usual_slots,
    waiting_external_requests,
)
from policies.pricing.rank_choice import lags_behind_best, lags_behind_best_rank, prefill_work
from policies.pricing.session_placement import SessionStarts, own_delay
from policies.pricing.speed_differences import (
    TEST_S,
    LateLabel,
    LateTests,
    slow_by_label,
    was_observed,
)
from policies.pricing.usual_slo import UsualSlo
from policies.routing_types import Candidate, Request, RoutingQuery

RANKED = 4
"""Number of the best-ranked candidates of a large pool that are priced for a request, besides those
with its prefix cached."""

ROUNDING = 2.0**48 + 1.0

# Every request reads these of all candidates: one call in C, in place of a loop.
_RANKS = attrgetter("load.lockstep_ranks")


class PricedPolicy(PolicyParams, frozen=True):
    """A policy that picks the endpoint where a request does least harm, to itself and others.

    Harm is measured as a price: the expected loss by delays. The loss is 1 if one request uses up
    exactly its latency budget (TTFT for the first token, TPOT for each further one). A delay of x
    budgets is a loss of x cubed, so small delays are nearly free. From `late` budgets on, a loss
    grows only by `overdue` per budget: a request that is late in any case must not displace others.

    The price of an endpoint is the sum of five terms, which docs/how-the-price-works.md explains:

    ttft    loss by the wait for this request's first token: for the queue (or for KV memory or a
            slot, if that takes longer) and for its own prefill, as a share of what is left of the
            TTFT budget
    tpot    tpot_weight x loss by this request's decoding: the expected time of a step, as a share
            of the TPOT budget
    others  others_weight x additional loss of the answers that run or wait there. This request's
            prefill delays them, and its decoding lengthens each of their steps
    work    work_weight x loss of later requests, which find a queue that is longer by this prefill.
            Added is regret_weight x the regret: the prefill that they must repeat because of
            evicted cache; and for a turn of a session, move_weight x the prefill of what another
            endpoint has cached
    kv      kv_weight x the expected number of other requests that will lack KV memory or a slot

    The details of each term:

    - ttft: A request that is only decoded here queues as well, because its KV waits behind the
      prompts. If the first token is overdue already, it is expected to take as long again.
    - tpot: The part of a step that other prompts' prefills take counts `lumps` times. It comes in a
      few long pauses, which a short answer cannot average out.
    - others: An answer's delays so far, the queue before this request and this prefill are divided
      by the answer's length. That length is unknown: the loss is a mean over the lengths that are
      still possible at the answer's age (running_answer_lengths.py). Prompts that wait for KV delay
      no answer. Of the queue, only prompts known to this gateway count. The others are assumed to
      take as long as this one, so a longer prefill would seem to do less harm. A request that is
      only prefilled here has one token, and nothing to lose after it.
    - work: The next request loses by the longer queue. Of a queue in which all are late, as much
      counts as the next request in time would lose. Requests behind it lose the engine's time: the
      prefill as a share of the TTFT budget, times the share of time for which the engine has
      computed prompts lately. So time that would not be used costs little. KV that was computed
      elsewhere evicts cache too. A transfer of KV delays the next ones over both links in the same
      way.
    - kv: A full engine loses about one request for each that it takes. The probability that it will
      be full is taken as the cube of the used share of KV. So for KV the number is that cube times
      this request's KV, in units of one answer's equal part. For slots it is the used share to the
      power of 4. Shared prefixes count once, and of the tokens that answers are expected to
      generate, half.

    Other parameters:

    equal_speed_factor  endpoints count as equally fast if their learned speeds differ from the
                        median by less than this factor, within the uncertainty of the speeds
    measured_share      share of the candidates whose prefill and decoding must have been observed
                        before prices decide; one of the two is enough after a while (PoolSpeeds).
                        Labels and defaults may name another GPU. Until then the score of
                        `prefix_aware` decides, which needs no speeds
    fresh_s             maximum age of a scrape of the engine's metrics, in seconds. The load is
                        what this gateway has reserved; a scrape only adds requests from elsewhere

    Related work: opportunity costs in online routing (Awerbuch, Azar, Plotkin 1993). Mooncake's
    TTFT and LMetric's product are first-order cases. JITServe's density treats deadlines that
    cannot be met as `late` and `overdue` do.
    """

    late: Factor = 1.35
    overdue: NonNegative = 0.6
    tpot_weight: NonNegative = 1.0
    lumps: Factor = 2.0
    others_weight: NonNegative = 1.0
    work_weight: NonNegative = 1.0
    regret_weight: NonNegative = 3.0
    move_weight: NonNegative = 30.0
    measured_share: Fraction = 0.5
    kv_weight: NonNegative = 0.5
    equal_speed_factor: Factor = 1.5
    fresh_s: NonNegative = 5.0

    def build(self) -> Policy:
        prices = PriceScorer(self)
        return Policy(
            name="priced",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(prices.scores),),
            picker=pickers.best,
            reads_prefix=True,
            reads_forecast=True,
            price_terms=prices.terms,
            phase_prices=prices.prices,
            ranking=Ranking(
                prices.usual_price,
                depth=RANKED,
                is_certain=is_idle,
                rises=is_first_token_late,
                tests=slow_by_label,
                is_tested=was_observed,
            ),
        )


def is_idle(load: EndpointLoad) -> bool:
    """Return whether an endpoint serves no request, as far as this gateway knows."""
    return not load.in_flight and not load.external_requests


def round_down(price: float) -> float:
    """Return a price that has five binary digits, and is lower than `price` by 6 % at most."""
    # The large product has no room for the further digits. Rounding adds at most what is
    # subtracted before.
    price -= price / 32.0
    product = price * ROUNDING
    return product - (product - price)


class PriceTerms(msgspec.Struct, frozen=True):
    """The terms of the price of serving a request at an endpoint, in units of lost requests."""

    ttft: float
    tpot: float
    others: float
    work: float
    kv: float

    @property
    def total(self) -> float:
        return self.ttft + self.tpot + self.others + self.work + self.kv


class PriceScorer:
    """Computes the prices of the routing policy `priced`, for one set of its parameters.

    PricedPolicy describes the price. `prices` is called for every request.
    """

    __slots__ = (
        "_late_tests",
        "_loop",
        "_prefill_work",
        "_speeds",
        "_starts",
        "_usual",
        "_usual_slo",
        "weights",
    )

    def __init__(self, weights: PricedPolicy) -> None:
        self.weights, self._loop, self._usual = weights, PriceLoop(weights), PriceLoop(weights)
        self._speeds = PoolSpeeds(weights.equal_speed_factor, weights.measured_share)
        self._usual_slo = UsualSlo(USUAL_REQUEST.slo)
        self._late_tests = LateTests()
        self._starts, self._prefill_work = SessionStarts(), prefill_work(weights.fresh_s)

    def scores(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        """Return a score per candidate: the negative price of serving the request there."""
        loop, factors = self._loop, self._speeds.factors(candidates)
        loop.set_request(query.request, query.now, WHOLE_REQUEST)
        if query.request.session:
            loop.set_most_cached(most_cached(candidates, query.cached_by_slot))
        # Sessions that begin before prices decide are remembered, too.
        is_start = bool(query.request.session) and self._starts.is_first(query.request)
        rows = zip(candidates, *factors, repeat(0.0))
        if self._usual_slo.vote(query.request.slo):
            request = msgspec.structs.replace(USUAL_REQUEST, slo=query.request.slo)
            self._usual.set_request(request, query.now, WHOLE_REQUEST)
        if not self._speeds.can_decide(query.now):
            lags = lags_behind_best(self._prefill_work(query, candidates))
            best = islice(rows, at := lags.index(0.0), at + 1)
            price = loop.prices(best, query.cached_by_slot, usual_slots(candidates))[0]
            return [-price - lag for lag in lags]
        if any(map(_RANKS, candidates)):
            lags = lags_behind_best_rank(candidates, self._prefill_work(query, candidates))
            scores = self._scores_with_lags(query, list(rows), lags)
        elif is_start:
            placed = list(rows)
            scores = self._scores_with_lags(query, placed, self._lags_of_start(query, placed))
        else:
            usual = usual_slots(candidates)
            prices = loop.prices(rows, query.cached_by_slot, usual, is_partial=True)
            scores = list(map(neg, prices))
        if self._speeds.has_unobserved:
            self._prefer_test(query, candidates, scores)
        return scores

    def _scores_with_lags(
        self, query: RoutingQuery, rows: Sequence[Row], lags: Sequence[float]
    ) -> list[float]:
        # Return the negative prices of the candidates without a lag. All others score less.
        cached, usual = query.cached_by_slot, usual_slots([row[0] for row in rows])
        best = [index for index, lag in enumerate(lags) if not lag]
        prices = self._loop.prices_of_ranks([rows[index] for index in best], cached, usual, True)
        highest = max(prices)
        scores = [-highest - lag for lag in lags]
        for index, price in zip(best, prices, strict=True):
            scores[index] = -price
        return scores

    def _lags_of_start(self, query: RoutingQuery, rows: Sequence[Row]) -> list[float]:
        # Return by how much a new session's first request is later than at the best candidate.
        request, now, cached = query.request, query.now, query.cached_by_slot
        usual, delays = usual_slots([row[0] for row in rows]), []
        for candidate, fast, attention, slow, _ in rows:
            load = candidate.load
            hit = cached[load.slot] if load.slot < len(cached) else 0
            fill_s = self._fill_s(load, request.prompt_tokens, hit, fast, attention)
            start_s = self._start_s(query, load, usual, fill_s)
            delays.append(own_delay(request, load, slow, start_s + fill_s, now))
        least = min(delays)
        return [delay - least for delay in delays]

    def _prefer_test(
        self, query: RoutingQuery, candidates: Sequence[Candidate], scores: list[float]
    ) -> None:
        # Prefer an idle endpoint that is believed to be slow only because its label says so.
        #
        # It is tested with a request that is in time even if the label is right. If the label says
        # that none is, one that is not later than most is risked once in a while. The request shows
        # the speed if its first token can be seen, and if it is long enough or the first short one.
        # One that has failed at another endpoint already is not delayed again.
        request = query.request
        shows_speed = query.computes_tokens and (request.stream or request.output_tokens <= 1)
        if query.failed_endpoints or not shows_speed:
            return
        late: dict[int, LateLabel] = {}
        for index in slow_by_label(candidates):
            load = candidates[index].load
            if load.in_flight or self._reads_scrape(load, query.now):
                self._late_tests.forget(load.slot)
                continue
            lateness = self._test_lateness(load, query)
            if lateness is None:
                continue
            if lateness <= 1.0:
                scores[index] = 1.0  # all others are negative
                return
            late[index] = load, lateness
        due = self._late_tests.due(request.id, late) if late else None
        if due is not None:
            scores[due] = 1.0

    def _test_lateness(self, load: EndpointLoad, query: RoutingQuery) -> float | None:
        # Return the largest share of a budget that a request takes at an idle endpoint by its
        # label, or None if the request would not show the speed.
        request = query.request
        fill_s = self._fill_s(load, request.prompt_tokens, 0, 1.0, 1.0)
        teaches = fill_s >= TEST_S or not load.belief.was_reached
        if not teaches or request.prompt_tokens > load.free_kv_tokens:
            return None
        step_s = load.decode_s_per_token + load.decode_s_per_sequence
        return max(
            (load.fixed_ttft_s + fill_s) / patience_s(request, query.now),
            step_s / request.slo.tpot_s,
        )

    def terms(
        self, query: RoutingQuery, candidates: Sequence[Candidate]
    ) -> list[Mapping[str, float]]:
        """Return the parts of each candidate's price by name, so that a pick can be explained."""
        return [
            msgspec.structs.asdict(self.explain(query, candidates, index))
            for index in range(len(candidates))
        ]

    def prices(
        self, query: RoutingQuery, candidates: Sequence[Candidate], part: PhaseShare = WHOLE_REQUEST
    ) -> list[float]:
        loop, factors = self._loop, self._speeds.factors(candidates)
        loop.set_request(query.request, query.now, part)
        if is_turn(query.request, part):
            loop.set_most_cached(most_cached(candidates, query.cached_by_slot))
        delays_s = part.transfers_s or [part.transfer_s] * len(candidates)
        rows = zip(candidates, *factors, delays_s, strict=True)
        cached, usual = query.cached_by_slot, usual_slots(candidates)
        if any(map(_RANKS, candidates)):
            prices = loop.prices_of_ranks(list(rows), cached, usual, is_partial=False)
        else:
            prices = loop.prices(rows, cached, usual)
        for index, links in enumerate(part.link_loads):
            prices[index] += self._loss_of_later_transfers(links, query.request.slo.ttft_s)
        return prices

    def usual_price(self, candidate: Candidate, now: float) -> float:
        """Return the price of a usual request without cached tokens, to keep endpoints sorted.

        Differences of learned speeds count in full here. For the best endpoints of the order,
        prices are computed again, without differences that may be noise. Prices of idle endpoints
        are rounded down, by 6 % at most. They differ by how busy each has lately been, and these
        differences would spread requests over more endpoints than have part of the prompt cached.
        """
        usual, load = self._usual, candidate.load
        usual.now = now
        price = usual.prices(((candidate, 1.0, 1.0, 1.0, 0.0),), (), load.slots)[0]
        return round_down(price) if is_idle(load) else price

    def explain(
        self,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        index: int,
        part: PhaseShare = WHOLE_REQUEST,
    ) -> PriceTerms:
        """Return the parts of one candidate's price by name: the slow, readable form of `prices`.

        candidates  the endpoints, because some parts depend on all of them
        index       which of them is explained
        part        whether the endpoint would compute the prompt, generate the answer, or both
        """
        weights, request, load = self.weights, query.request, candidates[index].load
        fast, attention, slow = (factors[index] for factors in self._speeds.factors(candidates))
        slo, usual = request.slo, usual_slots(candidates)
        cached = query.cached_by_slot
        hit = cached[load.slot] if load.slot < len(cached) else 0
        fill_s = self._fill_s(load, request.prompt_tokens, hit, fast, attention)
        work_s = part.prefills * fill_s
        known_s = backlog_s(load, query.now)
        wait_s = self._wait_s(query, load, work_s)
        start_s = self._start_s(query, load, usual, work_s)
        transfer_s = part.transfers_s[index] if part.transfers_s else part.transfer_s
        links = part.link_loads[index] if part.link_loads else ()
        first_s = transfer_s + start_s + load.fixed_ttft_s + work_s
        context_s = load.decode_s_per_context_token
        sequence_s = load.decode_s_per_sequence + context_s * request.prompt_tokens
        more_s, step_s = part.decodes * slow * sequence_s, slow * load.decode_s_per_token
        busy = prefill_share(load)
        own_s = (step_s + more_s) * (1.0 + (weights.lumps - 1.0) * busy)
        pace_s = step_s * (1.0 - 0.5 * busy)
        grown = request.prompt_tokens - hit + part.decodes * request.output_tokens
        moved = self._moved(request, most_cached(candidates, cached), hit, part)
        return PriceTerms(
            ttft=self._loss(first_s / patience_s(request, query.now)),
            tpot=part.decodes * weights.tpot_weight * self._loss(own_s / slo.tpot_s),
            others=weights.others_weight
            * self._loss_of_all_answers(
                load, query.now, slo.tpot_s, pace_s, more_s, known_s, work_s
            ),
            work=weights.work_weight
            * (
                self._loss_of_next(wait_s / slo.ttft_s, work_s / slo.ttft_s)
                + busy * work_s / slo.ttft_s
                + self._loss_of_other_ranks(load, query.now, known_s, work_s) / slo.ttft_s
                + weights.regret_weight * load.eviction_regret * fill_s / slo.ttft_s
                + moved * fill_s / slo.ttft_s
            )
            + self._loss_of_later_transfers(links, slo.ttft_s),
            kv=weights.kv_weight
            * (self._loss_by_kv(load, query.now, grown) + slot_loss(load, usual)),
        )

    def _moved(self, request: Request, most: int, hit: int, part: PhaseShare) -> float:
        # Return by how many times its prefill a turn's price rises, because of what another
        # endpoint has cached: `most` tokens, and `hit` tokens are cached here.
        uncached = request.prompt_tokens - hit
        if not uncached or not is_turn(request, part):
            return 0.0
        return self.weights.move_weight * (most - hit) / uncached

    def _wait_s(self, query: RoutingQuery, load: EndpointLoad, work_s: float) -> float:
        # Return the seconds until all queued prompts are computed. External ones take `work_s`.
        wait_s = backlog_s(load, query.now)
        if self._reads_scrape(load, query.now):
            wait_s += waiting_external_requests(load) * work_s
        return wait_s

    def _start_s(
        self, query: RoutingQuery, load: EndpointLoad, usual: float, work_s: float
    ) -> float:
        # Return the seconds until an endpoint can begin with the request.
        wait_s, prompt_tokens = self._wait_s(query, load, work_s), query.request.prompt_tokens
        return max(wait_s, room_s(load, prompt_tokens), slot_wait_s(load, usual))

    def _fill_s(
        self, load: EndpointLoad, prompt_tokens: int, hit: int, fast: float, attention: float
    ) -> float:
        # Return the seconds of the prefill of a prompt of which `hit` tokens are cached.
        uncached = prompt_tokens - hit
        pair_s = attention * load.attention_s_per_pair
        return fast * uncached * (load.prefill_s_per_token + (hit + 0.5 * uncached) * pair_s)

    def _reads_scrape(self, load: EndpointLoad, now: float) -> bool:
        return bool(load.external_requests) and is_fresh(load, now - self.weights.fresh_s)

    def _loss_of_next(self, wait: float, work: float) -> float:
        # Return what the next request loses, in whose queue `work` comes after `wait`, both in TTFT
        # budgets. That queue is taken as so short that the next request can be in time.
        ahead = min(wait, max(0.0, self.weights.late - work))
        return self._loss(ahead + work) - self._loss(ahead)

    def _loss_of_later_transfers(self, links: Sequence[LinkLoad], ttft_s: float) -> float:
        # Return what later transfers of KV over two links lose by one more transfer.
        #
        # As many are expected to wait behind it as wait before it. On average, they find half of
        # the queue, which shortens until the link is idle.
        loss = 0.0
        for waiting, wait_s, service_s in links:
            next_loss = self._loss_of_next(0.5 * wait_s / ttft_s, service_s / ttft_s)
            loss += (waiting + 1) * next_loss
        return self.weights.work_weight * loss

    def _loss_by_kv(self, load: EndpointLoad, now: float, grown_tokens: float) -> float:
        # Return the expected number of other requests that will lack KV.
        room = load.kv_tokens or UNKNOWN_KV_TOKENS
        share = (load.kv_used_tokens + 0.5 * load.expected_tokens) / room
        if self._reads_scrape(load, now):
            share = max(share, load.kv_usage or 0.0)
        grown = grown_tokens / room
        return min(FULLEST, share + grown) ** 3 * grown * (load.answers + 1)

    def _loss_of_other_ranks(
        self, load: EndpointLoad, now: float, known_s: float, work_s: float
    ) -> float:
        # Return the engine time that later requests lose at the ranks which step with this one.
        #
        # They wait for its prefill. It counts as far as each rank has computed prompts lately.
        if not load.lockstep_ranks:
            return 0.0
        ahead_s = joint_backlog_s(load.lockstep_ranks, now)
        added_s = joint_work_s(len(load.lockstep_ranks), ahead_s, known_s, work_s)
        return (prefill_shares(load.lockstep_ranks) - prefill_share(load)) * added_s

    def _loss_of_all_answers(
        self,
        load: EndpointLoad,
        now: float,
        tpot_s: float,
        step_s: float,
        more_s: float,
        wait_s: float,
        work_s: float,
    ) -> float:
        # Return the loss that a request causes to the answers of the endpoint, and to those of the
        # ranks which step with it. The arguments are those of `_loss_of_others`.
        ranks = load.lockstep_ranks
        if not ranks:
            return self._loss_of_others(load, now, tpot_s, step_s, more_s, wait_s, work_s)
        ahead_s = joint_backlog_s(ranks, now)
        added_s = joint_work_s(len(ranks), ahead_s, wait_s, work_s)
        return sum(
            self._loss_of_others(
                rank, now, tpot_s, step_s, more_s if rank is load else 0.0, ahead_s, added_s
            )
            for rank in ranks
        )

    def _loss_of_others(
        self,
        load: EndpointLoad,
        now: float,
        tpot_s: float,
        step_s: float,
        more_s: float,
        wait_s: float,
        work_s: float,
    ) -> float:
        # Return the loss that a request causes to the endpoint's answers.
        #
        # Their steps take `step_s` each, and `more_s` more with the request. The prefills before
        # it take `wait_s`, its own `work_s`.
        loss = 0.0
        for count, inverse, began_s in load.timeline.answer_groups(load, now):
            delayed_s = wait_s + load.timeline.prefill_s - began_s
            before = step_s + delayed_s * inverse
            after = before + more_s + work_s * inverse
            loss += count * (self._loss(after / tpot_s) - self._loss(before / tpot_s))
        return loss

    def _loss(self, share: float) -> float:
        capped = min(share, self.weights.late)
        return capped**3 + self.weights.overdue * (share - capped)
