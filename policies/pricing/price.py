"""Price of serving a request at an endpoint: the expected loss in SLO attainment.

Contains the terms of the price, the policy `priced` that picks the cheapest endpoint, and prices of
single phases, which splitting adds up (split.py). Time estimates are in latency.py and
engine_timeline.py. docs/how-the-price-works.md explains the price without code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, sqrt
from operator import attrgetter
from random import Random

import msgspec

from policies import pickers
from policies.contract import WHOLE_REQUEST, PhaseShare, Policy, Ranking, WeightedScorer
from policies.engine.step_time import SpeedFactor
from policies.latency.latency import backlog_s, is_first_token_late, room_s
from policies.load import EndpointLoad
from policies.model import Candidate, Request, RoutingQuery
from policies.param_types import Factor, NonNegative
from policies.presets import DEFAULT_FILTERS, PolicyParams

LEAST_BUDGET = 0.05
"""Smallest share of the TTFT budget that prices assume to be left, however long the request has
waited at the gateway.
"""

SHORTEST = 32.0
"""Minimum length in tokens that answers are assumed to have when they are slowed down by others."""

UNKNOWN_KV_TOKENS = 500_000.0
"""Assumed KV capacity of an endpoint that has not reported its own."""

FULLEST = 1.5
"""Share of KV or slots in use beyond which the term `kv` does not grow: nothing more fits then."""

SIGMAS = 2.0
"""Differences of the learned speed up to this many standard deviations count as noise."""


USUAL_REQUEST = Request("", "", "", prompt_tokens=1000, output_tokens=256)
"""The request whose price ranks the candidates of a large pool."""

RANKED = 4
"""Candidates of a large pool that are priced for a request, besides those with its prefix."""

_AS_LEARNED = ([1.0], [1.0], [1.0])

# Every request reads these of all candidates: one call in C each, in place of a loop.
_PREFILL, _PAIRS = attrgetter("load.belief.prefill"), attrgetter("load.belief.pairs")
_STEP, _SLOTS = attrgetter("load.belief.step"), attrgetter("load.slots")
_FACTOR = attrgetter("factor")


class PricedPolicy(PolicyParams, frozen=True):
    """Policy that picks the endpoint with the least expected loss for this and all other requests.

    All losses have one unit, one request that uses up exactly its budget. Every delay is a share of
    a budget; its loss is the share cubed, so small delays are nearly free, up to `late` budgets.
    From there it grows only by `overdue` per budget: a request that is lost in any case should not
    displace others. The price of an endpoint is the sum of

        ttft    loss of this request's own first token: its queue, or the wait for KV or a slot
                where that is longer, plus prefill, over the rest of its TTFT budget. A request
                that only decodes here queues as well: its KV waits behind the prompts that are
                there. A first token that is overdue is expected to take as long again
        tpot    tpot_weight x loss of its own decoding: expected step time over its TPOT budget. The
                time that others' prefills take of it counts `lumps` times: it comes in lumps, which
                a short answer cannot average out
        others  others_weight x the increase in loss, by its prefill and its sequence, of each
                request that decodes there, at the slope of their present step time plus `stall` x
                the queue spread over an answer (many answers are shorter than expected and feel a
                queue more). Prompts that wait for KV stall no one, and a request that only prefills
                here has one token, so nothing to lose after it
        work    work_weight x prefill over the TTFT budget: engine time that is lost to others; plus
                regret_weight x the endpoint's eviction regret: cache that is evicted, also by KV
                that was computed elsewhere
        kv      kv_weight x the other requests that will lack KV or a slot for a sequence. A full
                engine loses about one other request for each that it takes, and whether it will
                be full grows with the cube of the share in use: so that cube x the KV that this
                request adds, in units of an equal part for each answer; for slots the share to
                the power of 4. Shared prefixes count once; of the tokens that answers are
                expected to have, half

    alike    endpoints whose learned speeds differ from the median by less than this factor, within
             their uncertainty, are treated as equal
    fresh_s  maximum age of a scrape in seconds; own reservations come first, a scrape only adds
             external requests

    Related work: opportunity costs of online routing (Awerbuch, Azar, Plotkin 1993); Mooncake's
    TTFT and LMetric's product are first-order cases; the cap is what JITServe's density does for
    deadlines that cannot be met.
    """

    late: Factor = 1.35
    overdue: NonNegative = 0.6
    tpot_weight: NonNegative = 1.0
    lumps: Factor = 3.0
    others_weight: NonNegative = 2.0
    stall: NonNegative = 2.0
    work_weight: NonNegative = 1.0
    regret_weight: NonNegative = 3.0
    kv_weight: NonNegative = 0.5
    alike: Factor = 1.5
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
"""Factors on prefill, on its attention, and on decode steps.

Each in the order of the candidates.
"""


class PriceTerms(msgspec.Struct, frozen=True):
    """The terms of one price, in units of lost requests; PricedPolicy describes them."""

    ttft: float
    tpot: float
    others: float
    work: float
    kv: float

    @property
    def total(self) -> float:
        return self.ttft + self.tpot + self.others + self.work + self.kv


class PriceScorer:
    """The price function for one set of weights, without state.

    `prices` runs on the path of every request.
    """

    __slots__ = ("_usual", "weights")

    def __init__(self, weights: PricedPolicy) -> None:
        self.weights = weights
        usual = RoutingQuery(USUAL_REQUEST, 0.0, Random(0))
        self._usual = _RequestTerms(weights, usual, WHOLE_REQUEST)

    def scores(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        """Return the negative price of the whole request at each candidate endpoint, in order."""
        return [-price for price in self.prices(query, candidates)]

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
        return _RequestTerms(self.weights, query, part).prices(
            candidates, query.cached_by_slot, self.speeds(candidates)
        )

    def usual_price(self, candidate: Candidate, now: float) -> float:
        """Return the price of a usual request without cached tokens, to rank the candidate.

        The candidate's speed is not equalized with that of others: the shortlist's speeds are.
        """
        return self._usual.price_at(candidate, now)

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
        slo, answer = request.slo, max(SHORTEST, load.expected_tokens / (load.answers or 1))
        cached_here = (
            query.cached_by_slot[load.slot] if load.slot < len(query.cached_by_slot) else 0
        )
        uncached, room = request.prompt_tokens - cached_here, load.kv_tokens or UNKNOWN_KV_TOKENS
        pair_s = attention * load.attention_s_per_pair
        token_s = load.prefill_s_per_token + (cached_here + 0.5 * uncached) * pair_s
        fill_s = fast * uncached * token_s
        work_s = part.prefills * fill_s
        usual = usual_slots(candidates)
        wait_s = backlog_s(load, query.now)
        share = (load.kv_used_tokens + 0.5 * load.expected_tokens) / room
        if load.external_requests and is_fresh(load, query.now - weights.fresh_s):
            wait_s += waiting_external_requests(load) * work_s
            share = max(share, load.kv_usage or 0.0)
        start_s = max(wait_s, room_s(load, request.prompt_tokens), slot_wait_s(load, usual))
        transfer_s = part.transfers_s[index] if part.transfers_s else part.transfer_s
        first_s = transfer_s + start_s + load.fixed_ttft_s + work_s
        context_s = load.decode_s_per_context_token
        sequence_s = load.decode_s_per_sequence + context_s * request.prompt_tokens
        more_s = part.decodes * slow * sequence_s
        step_s = slow * load.decode_s_per_token + more_s
        added = (work_s / answer + more_s) / slo.tpot_s
        slope = min(
            weights.late, (step_s + weights.stall * wait_s / answer) / slo.tpot_s + 0.5 * added
        )
        if context_s > load.belief.context_s:
            step_s *= 1.0 + (weights.lumps - 1.0) * (1.0 - load.belief.context_s / context_s)
        grown = (uncached + part.decodes * request.output_tokens) / room
        return PriceTerms(
            ttft=self._loss(first_s / patience_s(request, query.now)),
            tpot=part.decodes * weights.tpot_weight * self._loss(step_s / slo.tpot_s),
            others=weights.others_weight * load.expected_tokens / answer * added * 3.0 * slope**2,
            work=weights.work_weight
            / slo.ttft_s
            * (work_s + weights.regret_weight * load.eviction_regret * fill_s),
            kv=weights.kv_weight
            * (
                min(FULLEST, share + grown) ** 3 * grown * (load.answers + 1)
                + slot_loss(load, usual)
            ),
        )

    def speeds(self, candidates: Sequence[Candidate]) -> SpeedFactors:
        """Return lists of correction factors, by candidate, for prefill, attention and decode
        steps.

        They make endpoints of similar learned speed equal.
        """
        if not candidates:
            return [], [], []
        alike = self.weights.alike
        return (
            equalize_speeds(list(map(_PREFILL, candidates)), alike),
            equalize_speeds(list(map(_PAIRS, candidates)), alike),
            equalize_speeds(list(map(_STEP, candidates)), alike),
        )

    def _loss(self, share: float) -> float:
        capped = min(share, self.weights.late)
        return capped**3 + self.weights.overdue * (share - capped)


class _RequestTerms:
    # The parts of a price that are equal for all candidates, computed once per query.
    #
    # All attributes are C doubles in the compiled module, and so are locals annotated as float
    # (deploy/).

    __slots__ = (
        *(
            "_beyond",
            "_decoded",
            "_fresh_s",
            "_kv_weight",
            "_late",
            "_later",
            "_lumps",
            "_now",
            "_oldest",
            "_others",
            "_overdue",
        ),
        *(
            "_own",
            "_per_tpot",
            "_per_ttft",
            "_prefills",
            "_prompt",
            "_regretted",
            "_stall",
            "_transfer_s",
            "_transfers_s",
            "_work",
        ),
    )

    def __init__(self, weights: PricedPolicy, query: RoutingQuery, part: PhaseShare) -> None:
        request, slo = query.request, query.request.slo
        self._late, self._overdue = weights.late, weights.overdue
        self._beyond = weights.late**3 - weights.overdue * weights.late
        self._fresh_s = weights.fresh_s
        self._now, self._oldest = query.now, query.now - weights.fresh_s
        self._prompt, self._later = request.prompt_tokens, part.decodes * request.output_tokens
        self._prefills, self._transfer_s = part.prefills, part.transfer_s
        self._transfers_s = part.transfers_s
        self._per_ttft, self._per_tpot = 1.0 / patience_s(request, query.now), 1.0 / slo.tpot_s
        self._decoded, self._own = part.decodes / slo.tpot_s, part.decodes * weights.tpot_weight
        self._others, self._stall = 3.0 * weights.others_weight * slo.tpot_s, weights.stall
        self._work, self._regretted = weights.work_weight / slo.ttft_s, weights.regret_weight
        self._kv_weight, self._lumps = weights.kv_weight, weights.lumps - 1.0

    def price_at(self, candidate: Candidate, now: float) -> float:
        # Return the price of this request at one candidate that has none of its prompt, if it
        # came now.
        self._now, self._oldest = now, now - self._fresh_s
        return self.prices((candidate,), (), _AS_LEARNED)[0]

    def prices(
        self, candidates: Sequence[Candidate], cached: Sequence[int], factors: SpeedFactors
    ) -> list[float]:
        # Return the price at each candidate; one unrolled loop, because every request runs it.
        known, prices = len(cached), []
        usual: float = usual_slots(candidates)
        prompt: float = self._prompt
        late: float = self._late
        fast: float
        attention: float
        slow: float
        delay_s: float
        rows = zip(candidates, *factors, self._delays_s(candidates), strict=True)
        for candidate, fast, attention, slow, delay_s in rows:
            load: EndpointLoad = candidate.load
            hit: float = cached[load.slot] if load.slot < known else 0
            ready_at: float = load.prefill_done_at
            context_s: float = load.decode_s_per_context_token
            plain_s: float = load.belief.context_s
            expected: float = load.expected_tokens
            room: float = load.kv_tokens or UNKNOWN_KV_TOKENS
            share: float = (load.kv_used_tokens + 0.5 * expected) / room
            uncached = prompt - hit
            pairs_s: float = attention * (hit + 0.5 * uncached) * load.attention_s_per_pair
            fill_s = fast * uncached * (load.prefill_s_per_token + pairs_s)
            work_s = self._prefills * fill_s
            wait_s: float = ready_at - self._now if ready_at > self._now else 0.0
            if self._now > load.next_first_token_at:
                wait_s = backlog_s(load, self._now)
            if load.external_requests and is_fresh(load, self._oldest):
                wait_s += waiting_external_requests(load) * work_s
                share = max(share, load.kv_usage or 0.0)
            start_s: float = (
                wait_s if prompt <= load.free_kv_tokens else max(wait_s, room_s(load, prompt))
            )
            grown = (uncached + self._later) / room
            full = share + grown if share + grown < FULLEST else FULLEST
            lack = full * full * full * grown * (load.answers + 1)
            if usual < inf:
                start_s = max(start_s, slot_wait_s(load, usual))
                lack += slot_loss(load, usual)
            first = (delay_s + start_s + load.fixed_ttft_s + work_s) * self._per_ttft
            more = self._decoded * slow * (load.decode_s_per_sequence + context_s * prompt)
            step = slow * load.decode_s_per_token * self._per_tpot + more
            answer = expected / (load.answers or 1)
            per_answer = self._per_tpot / (answer if answer > SHORTEST else SHORTEST)
            more += work_s * per_answer
            slope = step + self._stall * per_answer * wait_s + 0.5 * more
            slope = slope if slope < late else late
            if context_s > plain_s:  # stretched by others' prefills: their part of a step
                step *= 1.0 + self._lumps * (1.0 - plain_s / context_s)
            prices.append(
                (first * first * first if first < late else self._beyond + self._overdue * first)
                + self._own
                * (step * step * step if step < late else self._beyond + self._overdue * step)
                + self._others * expected * per_answer * more * slope * slope
                + self._work * (work_s + self._regretted * load.eviction_regret * fill_s)
                + self._kv_weight * lack
            )
        return prices

    def _delays_s(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        return self._transfers_s or [self._transfer_s] * len(candidates)


def patience_s(request: Request, now: float) -> float:
    """Return the remaining seconds of a request's TTFT budget, or a lower bound if it is nearly
    used.
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
    """Return the most slots (sequences at a time) that any candidate has shown; inf if none has.

    An endpoint that has not shown its own number is assumed to have as many.
    """
    shown: list[float] = list(map(_SLOTS, candidates))
    if min(shown, default=inf) == inf:
        return inf
    return max(slots for slots in shown if slots < inf)


def slot_wait_s(load: EndpointLoad, usual: float) -> float:
    """Return the seconds that one more request would wait at an endpoint until a sequence ends.

    Return 0 if a slot is free. `usual` is the slots of an endpoint that has not shown its own.
    """
    slots = min(load.slots, usual)
    missing = load.in_flight + 1 - slots
    if missing <= 0.0:
        return 0.0
    answer_s = load.expected_tokens / (load.answers or 1) * load.decode_s_per_token
    return missing * answer_s / slots


def slot_loss(load: EndpointLoad, usual: float) -> float:
    """Return the number of requests that will lack a slot: the share in use to the power of 4.

    `usual` is the slots of an endpoint that has not shown its own.
    """
    crowd: float = min(FULLEST, (load.in_flight + 1) / min(load.slots, usual))
    return crowd * crowd * crowd * crowd


def is_fresh(load: EndpointLoad, oldest: float) -> bool:
    """Return whether the endpoint's metrics were scraped at the time `oldest` or later."""
    return load.scraped_at is not None and load.scraped_at >= oldest


def equalize_speeds(speeds: Sequence[SpeedFactor], alike: float) -> list[float]:
    """Return factors that bring each speed to the median, within `alike` and its uncertainty.

    Learned speeds of equal endpoints differ by noise, and only differences beyond it should count.
    Otherwise the endpoint that seems slightly faster would get all work without another preference.
    The same would happen to an endpoint without observations where others are slower than
    estimated. Under so much prefill it could not show its decode speed.
    """
    factors = list(map(_FACTOR, speeds))
    ordered = sorted(factors)
    middle = ordered[len(ordered) // 2]
    corrections = list(map(middle.__truediv__, factors))
    if ordered[-1] <= alike * middle <= alike * alike * ordered[0]:
        return corrections
    bounds = [alike * exp(SIGMAS * sqrt(speed.var)) for speed in speeds]
    return [
        min(limit, max(1.0 / limit, correction))
        for correction, limit in zip(corrections, bounds, strict=True)
    ]
