"""The price of serving a request at an endpoint: the expected loss in SLO attainment.

Contains the terms of the price, the policy `priced` that picks the cheapest endpoint, and prices of
single phases, which splitting adds up (split_decision.py). Time estimates are in
expected_latency.py and engine_timeline.py. docs/how-the-price-works.md explains the price without
code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from math import inf
from operator import attrgetter, neg

import msgspec

from policies import pickers
from policies.endpoint_load import EndpointLoad
from policies.engine.engine_timeline import EngineTimeline
from policies.engine.running_answer_lengths import AgeGroup, per_token
from policies.engine.step_time import UsualSpeeds
from policies.latency.expected_latency import backlog_s, is_first_token_late, room_s
from policies.param_types import Factor, NonNegative
from policies.policy_types import WHOLE_REQUEST, PhaseShare, Policy, Ranking, WeightedScorer
from policies.presets import DEFAULT_FILTERS, PolicyParams
from policies.pricing.speed_differences import (
    TEST_S,
    UNOBSERVED,
    equalize_speeds,
    slow_by_label,
)
from policies.routing_types import Candidate, Request, RoutingQuery

LEAST_BUDGET = 0.05
"""Smallest share of the TTFT budget (0 to 1) that prices assume to be left, however long the
request has waited."""

UNKNOWN_KV_TOKENS = 500_000.0
"""KV capacity in tokens that is assumed for an endpoint which has not reported its own."""

FULLEST = 1.5
"""Share of KV or slots in use above which the price term `kv` does not grow, because nothing more
fits."""

USUAL_REQUEST = Request("", "", "", prompt_tokens=1000, output_tokens=256)
"""The assumed request by whose price the candidates of a large pool are ranked."""

RANKED = 4
"""Number of the best-ranked candidates of a large pool that are priced for a request, besides those
with its prefix cached."""

# Every request reads these of all candidates: one call in C each, in place of a loop.
_SPEEDS, _SLOTS = attrgetter("load.belief.speeds"), attrgetter("load.slots")


class PricedPolicy(PolicyParams, frozen=True):
    """A policy that picks the endpoint where a request causes the least expected loss, to itself
    and to all other requests.

    The unit of all losses is one request that uses up exactly its budget. A delay of x budgets is a
    loss of x cubed, so that small delays are nearly free. From `late` budgets on, a loss grows only
    by `overdue` per budget: a request that misses its budget in any case must not displace others.

    The price of an endpoint is the sum of five terms:

        ttft    Loss by the wait for this request's first token. The wait is the queue (or the time
                until KV or a slot is free, if that is longer) plus the prefill, as a share of what
                is left of the TTFT budget. A request that only decodes here queues as well, because
                its KV waits behind the prompts. If the first token is overdue already, it is
                expected to take as long again.
        tpot    tpot_weight x loss by this request's decoding: the expected step time as a share of
                the TPOT budget. The part of it that other prompts' prefills take counts `lumps`
                times, since it comes in a few long pauses, which a short answer cannot average out.
        others  others_weight x the additional loss of the answers that run or wait there, from this
                request's prefill and from its place in each decode step. An answer's delays so far,
                the queue before this request and this prefill are divided by the answer's length.
                That length is unknown: the loss is a mean over the lengths that are still possible
                at the answer's age (running_answer_lengths.py). Prompts that wait for KV delay no
                answer. Of the queue, only prompts known to this gateway count: the others are
                assumed to take as long as this one, so a longer prefill would seem to do less harm.
                A request that only prefills here has one token, and nothing to lose after it.
        work    work_weight x what later requests lose by this prefill. The next one finds a queue
                that is longer by it, and loses so much more; of a queue in which all are late,
                as much counts as the next one in time would have. Those behind it lose the engine's
                time: the prefill as a share of the TTFT budget, x the share of time for which the
                engine has computed prompts lately. So time that would not be used costs little.
                To it comes regret_weight x the regret for evicted cache: the prefill that later
                requests must repeat. KV that was computed elsewhere evicts cache too.
        kv      kv_weight x the expected number of other requests that will lack KV or a slot. A
                full engine loses about one request for each that it takes, and the probability that
                it will be full is taken as the cube of the used share of KV. So for KV the number
                is that cube x this request's KV, in units of one answer's equal part; for slots it
                is the used share to the power of 4. Shared prefixes count once, and of the tokens
                that answers are expected to generate, half.

    Other parameters:

    equal_speed_factor  Endpoints count as equally fast if their learned speeds differ from the
                        median by less than this factor, within the uncertainty of the speeds.
    fresh_s             Maximum age of a scrape of the engine's metrics, in seconds. The load is
                        what this gateway has reserved; a scrape only adds requests from elsewhere.

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
            ranking=Ranking(prices.usual_price, depth=RANKED, rises=is_first_token_late),
        )


SpeedFactors = tuple[list[float], list[float], list[float]]
"""Correction factors for prefill, for its attention, and for decode steps; each a list in the order
of the candidates."""


_Row = tuple[Candidate, float, float, float, float]
# A candidate, the three factors on its speed, and the seconds of a KV transfer to or from it.


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
    """The price function of the policy `priced`, for one set of weights.

    `prices` is called for every request.
    """

    __slots__ = ("_factors", "_has_unobserved", "_learned", "_loop", "_usual", "weights")

    def __init__(self, weights: PricedPolicy) -> None:
        self.weights, self._loop, self._usual = weights, _PriceLoop(weights), _PriceLoop(weights)
        self._learned: list[UsualSpeeds] = []
        self._factors: SpeedFactors = [], [], []
        self._has_unobserved = False

    def scores(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        """Return the negative price of serving the whole request at each candidate endpoint, in
        order.
        """
        loop, factors = self._loop, self.speeds(candidates)
        loop.set_request(query.request, query.now, WHOLE_REQUEST)
        rows = zip(candidates, *factors, repeat(0.0))
        usual = usual_slots(candidates)
        scores = list(map(neg, loop.prices(rows, query.cached_by_slot, usual, is_partial=True)))
        if self._has_unobserved:
            self._prefer_test(query, candidates, scores)
        return scores

    def _prefer_test(
        self, query: RoutingQuery, candidates: Sequence[Candidate], scores: list[float]
    ) -> None:
        # Prefer an idle endpoint that is believed to be slow only because its label says so.
        #
        # It is tested with a request that is in time even if the label is right, and that shows the
        # speed: its first token can be seen, and it is long enough or the first short one.
        request = query.request
        if not request.stream and request.output_tokens > 1:
            return
        for index in slow_by_label(candidates):
            load = candidates[index].load
            fill_s = self._fill_s(load, request.prompt_tokens, 0, 1.0, 1.0)
            first_s = load.fixed_ttft_s + fill_s
            step_s = load.decode_s_per_token + load.decode_s_per_sequence
            is_in_time = first_s <= patience_s(request, query.now) and step_s <= request.slo.tpot_s
            is_idle = not load.in_flight and not self._reads_scrape(load, query.now)
            has_room = request.prompt_tokens <= load.free_kv_tokens
            teaches = fill_s >= TEST_S or not load.belief.was_reached
            if is_in_time and is_idle and has_room and teaches:
                scores[index] = 1.0  # all others are negative
                return

    def terms(
        self, query: RoutingQuery, candidates: Sequence[Candidate]
    ) -> list[Mapping[str, float]]:
        """Return the named terms of each candidate's price, to explain a pick."""
        return [
            msgspec.structs.asdict(self.explain(query, candidates, index))
            for index in range(len(candidates))
        ]

    def prices(
        self, query: RoutingQuery, candidates: Sequence[Candidate], part: PhaseShare = WHOLE_REQUEST
    ) -> list[float]:
        loop, factors = self._loop, self.speeds(candidates)
        loop.set_request(query.request, query.now, part)
        delays_s = part.transfers_s or [part.transfer_s] * len(candidates)
        rows = zip(candidates, *factors, delays_s, strict=True)
        return loop.prices(rows, query.cached_by_slot, usual_slots(candidates))

    def usual_price(self, candidate: Candidate, now: float) -> float:
        """Return the price of a usual request without cached tokens, by which the candidate is
        ranked.

        Speeds are not equalized here; that is done for the candidates of the shortlist.
        """
        usual = self._usual
        usual.now = now
        slots = candidate.load.slots
        return usual.prices(((candidate, 1.0, 1.0, 1.0, 0.0),), (), slots)[0]

    def explain(
        self,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        index: int,
        part: PhaseShare = WHOLE_REQUEST,
    ) -> PriceTerms:
        """Return the named terms of the price at candidates[index], for the explanation of a pick.

        The arithmetic is that of `prices`, written to be read.
        """
        weights, request, load = self.weights, query.request, candidates[index].load
        fast, attention, slow = (factors[index] for factors in self.speeds(candidates))
        slo, usual = request.slo, usual_slots(candidates)
        cached = query.cached_by_slot
        hit = cached[load.slot] if load.slot < len(cached) else 0
        fill_s = self._fill_s(load, request.prompt_tokens, hit, fast, attention)
        work_s = part.prefills * fill_s
        wait_s = known_s = backlog_s(load, query.now)
        if self._reads_scrape(load, query.now):
            wait_s += waiting_external_requests(load) * work_s
        start_s = max(wait_s, room_s(load, request.prompt_tokens), slot_wait_s(load, usual))
        transfer_s = part.transfers_s[index] if part.transfers_s else part.transfer_s
        first_s = transfer_s + start_s + load.fixed_ttft_s + work_s
        context_s = load.decode_s_per_context_token
        sequence_s = load.decode_s_per_sequence + context_s * request.prompt_tokens
        more_s, step_s = part.decodes * slow * sequence_s, slow * load.decode_s_per_token
        busy = prefill_share(load)
        own_s = (step_s + more_s) * (1.0 + (weights.lumps - 1.0) * busy)
        pace_s = step_s * (1.0 - 0.5 * busy)
        grown = request.prompt_tokens - hit + part.decodes * request.output_tokens
        return PriceTerms(
            ttft=self._loss(first_s / patience_s(request, query.now)),
            tpot=part.decodes * weights.tpot_weight * self._loss(own_s / slo.tpot_s),
            others=weights.others_weight
            * self._loss_of_others(load, query.now, slo.tpot_s, pace_s, more_s, known_s, work_s),
            work=weights.work_weight
            * (
                self._loss_of_next(wait_s / slo.ttft_s, work_s / slo.ttft_s)
                + busy * work_s / slo.ttft_s
                + weights.regret_weight * load.eviction_regret * fill_s / slo.ttft_s
            ),
            kv=weights.kv_weight
            * (self._loss_by_kv(load, query.now, grown) + slot_loss(load, usual)),
        )

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

    def _loss_by_kv(self, load: EndpointLoad, now: float, grown_tokens: float) -> float:
        # Return the expected number of other requests that will lack KV.
        room = load.kv_tokens or UNKNOWN_KV_TOKENS
        share = (load.kv_used_tokens + 0.5 * load.expected_tokens) / room
        if self._reads_scrape(load, now):
            share = max(share, load.kv_usage or 0.0)
        grown = grown_tokens / room
        return min(FULLEST, share + grown) ** 3 * grown * (load.answers + 1)

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

    def speeds(self, candidates: Sequence[Candidate]) -> SpeedFactors:
        """Return lists of correction factors, by candidate, for prefill, attention and decode
        steps.

        With these factors, endpoints of similar learned speed count as equally fast. The last
        result is cached, because it changes only when a speed is observed.
        """
        learned = list(map(_SPEEDS, candidates))
        if learned != self._learned:
            prefill, pairs, step = zip(*learned, strict=True) if learned else ((), (), ())
            limit = self.weights.equal_speed_factor
            self._factors = (
                equalize_speeds(prefill, limit),
                equalize_speeds(pairs, limit),
                equalize_speeds(step, limit),
            )
            self._learned = learned
            self._has_unobserved = any(speeds.prefill == UNOBSERVED for speeds in learned)
        return self._factors

    def _loss(self, share: float) -> float:
        capped = min(share, self.weights.late)
        return capped**3 + self.weights.overdue * (share - capped)


class _PriceLoop:
    # The loop over candidates that computes the prices of one request, for one set of weights.
    #
    # Every request runs it. Of a partial price, all terms are left out without which it is above
    # another one already. All attributes are C doubles in the compiled module, and so are locals
    # annotated as float (deploy/). What the loop reads more than once is a local: an attribute
    # costs twice as much in the interpreter.

    __slots__ = (
        *("beyond", "fresh_s", "kv", "late", "lumps", "others", "overdue", "regret"),
        *("now", "per_budget", "per_tpot", "per_ttft", "prompt"),
        *("decoded", "later", "own", "prefills", "tpot", "work"),
    )

    def __init__(self, weights: PricedPolicy) -> None:
        self.late, self.overdue = weights.late, weights.overdue
        self.beyond = weights.late**3 - weights.overdue * weights.late
        self.fresh_s, self.lumps = weights.fresh_s, weights.lumps - 1.0
        self.tpot = weights.tpot_weight
        self.others, self.work = weights.others_weight, weights.work_weight
        self.regret, self.kv = weights.regret_weight, weights.kv_weight
        self.set_request(USUAL_REQUEST, 0.0, WHOLE_REQUEST)

    def set_request(self, request: Request, now: float, part: PhaseShare) -> None:
        # Set the request that is priced from here on, as if it came at `now`.
        slo, decodes = request.slo, part.decodes
        self.prompt, self.now, self.prefills = float(request.prompt_tokens), now, part.prefills
        left_s: float = slo.ttft_s
        if request.arrived_s:
            left_s = patience_s(request, now)
        self.per_ttft, self.per_tpot = 1.0 / left_s, 1.0 / slo.tpot_s
        self.later, self.own = decodes * request.output_tokens, decodes * self.tpot
        self.decoded, self.per_budget = decodes / slo.tpot_s, 1.0 / slo.ttft_s

    def prices(
        self, rows: Iterable[_Row], cached: Sequence[int], usual: float, is_partial: bool = False
    ) -> list[float]:
        # Return the price at each candidate. `usual` is what usual_slots returns for them.
        known, prices = len(cached), []
        lowest: float = inf
        prompt: float = self.prompt
        late: float = self.late
        fast: float
        attention: float
        slow: float
        delay_s: float
        for candidate, fast, attention, slow, delay_s in rows:
            load: EndpointLoad = candidate.load
            hit: float = cached[load.slot] if load.slot < known else 0
            uncached = prompt - hit
            pairs_s: float = attention * (hit + 0.5 * uncached) * load.attention_s_per_pair
            fill_s = fast * uncached * (load.prefill_s_per_token + pairs_s)
            work_s = self.prefills * fill_s
            known_s: float = load.prefill_done_at - self.now
            if known_s < 0.0 or self.now > load.next_first_token_at:
                known_s = backlog_s(load, self.now) if self.now > load.next_first_token_at else 0.0
            wait_s: float = known_s
            used: float = load.kv_used_tokens + 0.5 * load.expected_tokens
            room: float = load.kv_tokens or UNKNOWN_KV_TOKENS
            if load.external_requests and is_fresh(load, self.now - self.fresh_s):
                wait_s += waiting_external_requests(load) * work_s
                used = max(used, room * (load.kv_usage or 0.0))
            start_s = wait_s
            if prompt > load.free_kv_tokens or usual < inf:
                start_s = max(wait_s, room_s(load, prompt), slot_wait_s(load, usual))
            first: float = (delay_s + start_s + load.fixed_ttft_s + work_s) * self.per_ttft
            price: float = first * first * first if first < late else self._loss(first)
            context_s: float = load.decode_s_per_context_token
            busy: float = prefill_share(load)
            work: float = self.regret * load.eviction_regret * fill_s + busy * work_s
            later: float = work_s * self.per_budget  # below, a call only where prompts wait
            later = self._loss_of_next(wait_s, work_s) if wait_s or later >= late else later**3
            work = self.work * (work * self.per_budget + later)
            answers: float = load.answers
            if answers and self.now >= load.timeline.answers_due_at:
                load.timeline.update_answers(load, self.now)
            if price + work <= lowest:
                more = self.decoded * slow * (load.decode_s_per_sequence + context_s * prompt)
                step = slow * load.decode_s_per_token * self.per_tpot + more
                own = step * (1.0 + self.lumps * busy)
                price += self.own * (own * own * own if own < late else self._loss(own))
                grown = (uncached + self.later) / room
                full = used / room + grown
                crowd = full * full * full if full < FULLEST else FULLEST**3
                lack: float = grown * (answers + 1.0) * crowd
                lack = self.kv * (lack if usual == inf else lack + slot_loss(load, usual))
                if answers and price + lack + work <= lowest:
                    pace = (step - more) * (1.0 - 0.5 * busy)
                    lack += self.others * self._harm(load.timeline, pace, more, known_s, work_s)
                price += lack
            price += work
            prices.append(price)
            lowest = price if is_partial and price < lowest else lowest
        return prices

    def _loss_of_next(self, wait_s: float, work_s: float) -> float:
        # Return what the next request loses: its queue is `ahead` without this one, else `behind`.
        #
        # The queue is taken as short enough that the next request can be in time. Else a prefill
        # would cost the less, the longer the queue before it is.
        late: float = self.late
        behind: float = work_s * self.per_budget
        ahead: float = late - behind if behind < late else 0.0
        ahead = min(ahead, wait_s * self.per_budget)
        behind += ahead
        if behind >= late:
            return self.beyond + self.overdue * behind - ahead * ahead * ahead
        return behind * behind * behind - ahead * ahead * ahead

    def _harm(
        self, timeline: EngineTimeline, pace: float, more: float, wait_s: float, work_s: float
    ) -> float:
        # Return the loss that a request causes to the answers of an endpoint.
        #
        # pace and more are shares of the TPOT budget: the answers' step time, and its increase.
        # The prefills before the request take `wait_s` seconds, its own `work_s`.
        #
        # An answer of 1 / q tokens loses (pace + delayed * q) cubed before, and after it
        # (pace + more + (delayed + work) * q) cubed. Its mean over the lengths that an answer may
        # have needs only the means of q, its square and its cube.
        harm: float = 0.0
        late: float = self.late
        per_tpot: float = self.per_tpot
        delayed_s: float = wait_s + timeline.prefill_s
        before: float = pace
        after: float = pace + more
        before_1, before_2 = 3.0 * before, 3.0 * before * before
        after_1, after_2 = 3.0 * after, 3.0 * after * after
        step = after * after * after - before * before * before
        work: float = work_s * per_tpot
        count: float
        inverse: float
        began_s: float
        most: float
        first: float
        second: float
        third: float
        for group in timeline.answers.age_groups:
            count, inverse, began_s, most, first, second, third, age = group
            delay = (delayed_s - began_s) * per_tpot * inverse
            later = delay + work * inverse
            if after + later * most < late:
                harm += count * (
                    step
                    + later * (after_2 * first + later * (after_1 * second + later * third))
                    - delay * (before_2 * first + delay * (before_1 * second + delay * third))
                )
            else:
                ratios = timeline.answers.ratios[age:] or (1.0,)
                harm += self._harm_of_late(group, ratios, delayed_s, before, after, work)
        return harm

    def _harm_of_late(
        self,
        group: AgeGroup,
        ratios: Sequence[float],
        delayed_s: float,
        pace: float,
        after_pace: float,
        work: float,
    ) -> float:
        # Return the loss of answers of one age of which some may be late: theirs is no cube.
        harm: float = 0.0
        delay: float = (delayed_s - group[2]) * self.per_tpot
        for ratio in ratios:
            share: float = per_token(group[1] / ratio)
            before: float = pace + delay * share
            after: float = after_pace + (delay + work) * share
            harm += self._loss(after) - self._loss(before)
        return harm * group[0] / len(ratios)

    def _loss(self, share: float) -> float:
        if share < self.late:
            return share * share * share
        return self.beyond + self.overdue * share


def prefill_share(load: EndpointLoad) -> float:
    """Return the share of the expected step time, 0 to 1, that prefills of later requests take.

    A running answer is expected to feel half of them, because half of its tokens are generated in
    the mean.
    """
    context_s: float = load.decode_s_per_context_token
    if context_s > load.belief.context_s:  # stretched by prefills
        return 1.0 - load.belief.context_s / context_s
    return 0.0


def patience_s(request: Request, now: float) -> float:
    """Return the remaining seconds of a request's TTFT budget, but at least LEAST_BUDGET of the
    budget.
    """
    budget_s = request.slo.ttft_s
    waited_s = now - request.arrived_s if request.arrived_s else 0.0
    return max(LEAST_BUDGET * budget_s, budget_s - max(0.0, waited_s))


def waiting_external_requests(load: EndpointLoad) -> int:
    """Return the number of requests from outside the gateways that still waited at the last
    scrape.
    """
    return min(load.external_requests, load.waiting or 0)


def usual_slots(candidates: Sequence[Candidate]) -> float:
    """Return the largest number of slots (concurrent sequences) that any candidate has shown; inf
    if none has.

    An endpoint whose own number is unknown is assumed to have as many.
    """
    shown: list[float] = list(map(_SLOTS, candidates))
    if min(shown, default=inf) == inf:
        return inf
    return max(slots for slots in shown if slots < inf)


def slot_wait_s(load: EndpointLoad, usual: float) -> float:
    """Return the seconds that one more request would wait at an endpoint until a sequence ends.

    Returns 0 if a slot is free. `usual` is the slots of an endpoint that has not shown its own.
    """
    slots = min(load.slots, usual)
    missing = load.in_flight + 1 - slots
    if missing <= 0.0:
        return 0.0
    answer_s = load.expected_tokens / (load.answers or 1) * load.decode_s_per_token
    return missing * answer_s / slots


def slot_loss(load: EndpointLoad, usual: float) -> float:
    """Return the expected number of requests that will lack a slot: the share in use to the power
    of 4.

    `usual` is the slots of an endpoint that has not shown its own.
    """
    crowd: float = min(FULLEST, (load.in_flight + 1) / min(load.slots, usual))
    return crowd * crowd * crowd * crowd


def is_fresh(load: EndpointLoad, oldest: float) -> bool:
    """Return whether the endpoint's metrics were scraped at the time `oldest` or later."""
    return load.scraped_at is not None and load.scraped_at >= oldest
