"""The price of serving a request at an endpoint: what it is expected to cost everybody in kept promises.

Lives here: the terms of the price, the policy `priced` that picks the cheapest endpoint, and the two halves of a price
that splitting puts together (split.py). Not here: beliefs about time (latency.py, timeline.py), admission, pairs.
docs/how-the-price-works.md explains it without code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, sqrt

import msgspec

from policies import pickers
from policies.bounds import Amount, Factor
from policies.contract import WHOLE, Part, Policy, Weighted
from policies.latency import room_s
from policies.load import EndpointLoad
from policies.model import Ask, Candidate, Request
from policies.presets import ORDINARY, Preset
from policies.step_time import Speed

LEAST_BUDGET = 0.05
"""Share of the TTFT budget that is reckoned with when more than the rest was spent waiting at the gateway."""

SHORTEST = 32.0
"""Tokens that answers are taken to have at least where others are slowed down."""

UNKNOWN_KV_TOKENS = 500_000.0
"""KV tokens that an endpoint is taken to hold until it says so."""

SIGMAS = 2.0
"""How many standard deviations of what is believed of an endpoint's speed are noise."""


class Priced(Preset, frozen=True):
    """The cheapest endpoint: least loss of promises, this request's own and everybody else's, in one currency.

    One unit is one request that uses up exactly its budget. Every delay is a share of a budget; its loss is the share
    cubed, so small delays are nearly free, up to `late` budgets. From there it grows by `overdue` per budget only: a
    request that is lost anyway should not push others aside. The price of an endpoint is the sum of

        ttft    loss of this request's own first token: the queue, or the wait for KV where that is longer, + prefill,
                over what is left of its TTFT budget; who only decodes has a queue too, for KV that came over stands in
                line behind the prompts that are there
        tpot    tpot_weight x loss of its own decoding: expected step time over its TPOT budget, where the time that
                others' prefills take of it counts `lumps` times: it comes in lumps, which a short answer cannot spread
        others  others_weight x what its prefill and its sequence add to the loss of each request that has answers to
                come there, at the slope where those stand: step time, and `stall` x the queue spread over an answer
                (many answers are shorter than expected, and feel a queue of prompts more); prompts that wait for KV
                stall nobody, and who only prefills here has one token and nothing to lose after it
        work    work_weight x prefill over the TTFT budget: seconds that nobody else gets; and again regret_weight x
                the share of this endpoint's evictions that were asked for again: cache that somebody loses, also to
                KV that was computed elsewhere
        kv      kv_weight x what its KV adds to the cube of the share of memory that is booked; this one never bends

    alike    endpoints whose believed speeds differ by less than this factor from the median, and what they may be off,
             are taken to be equal
    fresh_s  how old a scrape may be to be believed, seconds; own bookings come first, a scrape only tells of strangers

    Kin: opportunity costs of online routing (Awerbuch, Azar, Plotkin 1993); Mooncake's TTFT and LMetric's product are
    first-order cases; the bend is what JITServe's density does for deadlines that cannot be met.
    """

    late: Factor = 1.35
    overdue: Amount = 0.6
    tpot_weight: Amount = 1.0
    lumps: Factor = 3.0
    others_weight: Amount = 2.0
    stall: Amount = 2.0
    work_weight: Amount = 1.0
    regret_weight: Amount = 3.0
    kv_weight: Amount = 0.5
    alike: Factor = 1.5
    fresh_s: Amount = 5.0

    def build(self) -> Policy:
        prices = Prices(self)
        return Policy(
            name="priced",
            filters=ORDINARY,
            scorers=(Weighted(prices.scores),),
            picker=pickers.best,
            reads_prefix=True,
            reads_beliefs=True,
            terms=prices.terms,
            parts=prices.prices,
        )


Factors = tuple[list[float], list[float], list[float]]
"""On prefill, on its attention besides, on decode steps; each aligned with the candidates."""


class Terms(msgspec.Struct, frozen=True):
    """The parts of one price, in requests lost."""

    ttft: float
    tpot: float
    others: float
    work: float
    kv: float

    @property
    def total(self) -> float:
        """The price."""
        return self.ttft + self.tpot + self.others + self.work + self.kv


class Prices:
    """The price function of one set of weights. Stateless; `prices` is the hot path."""

    __slots__ = ("weights",)

    def __init__(self, weights: Priced) -> None:
        self.weights = weights

    def scores(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """Negative prices of serving the whole request, aligned with the candidates."""
        return [-price for price in self.prices(ask, candidates)]

    def terms(self, ask: Ask, candidates: Sequence[Candidate]) -> list[Mapping[str, float]]:
        """What the price of serving all of it is made of, by name, aligned: for explaining a pick and its runner-up."""
        return [msgspec.structs.asdict(self.explain(ask, candidates, index)) for index in range(len(candidates))]

    def prices(self, ask: Ask, candidates: Sequence[Candidate], part: Part = WHOLE) -> list[float]:
        """Prices aligned with the candidates: the totals of `explain`."""
        return _Asked(self.weights, ask, part).prices(candidates, ask.cached, self.speeds(candidates))

    def explain(self, ask: Ask, candidates: Sequence[Candidate], index: int, part: Part = WHOLE) -> Terms:
        """The price of candidates[index] in its parts; the same arithmetic as `prices`, to be read."""
        weights, request, load = self.weights, ask.request, candidates[index].load
        fast, even, slow = (factors[index] for factors in self.speeds(candidates))
        slo, answer = request.slo, max(SHORTEST, load.expected_tokens / (load.answers or 1))
        held = ask.cached[load.slot] if load.slot < len(ask.cached) else 0
        new, room = request.prompt_tokens - held, load.kv_tokens or UNKNOWN_KV_TOKENS
        fill_s = fast * new * (load.token_s + even * (held + 0.5 * new) * load.pair_s)
        work_s = part.prefills * fill_s
        wait_s, share = max(0.0, load.ready_at - ask.now), load.kv_booked / room
        if load.strangers and load.scraped_at is not None and load.scraped_at >= ask.now - weights.fresh_s:
            wait_s += ahead(load) * work_s
            share = max(share, load.kv_usage or 0.0)
        first_s = part.transfer_s + max(wait_s, room_s(load, request.prompt_tokens)) + load.fixed_s + work_s
        more_s = part.decodes * slow * (load.sequence_s + load.context_s * request.prompt_tokens)
        step_s = slow * load.step_s + more_s
        added = (work_s / answer + more_s) / slo.tpot_s
        stand = min(weights.late, (step_s + weights.stall * wait_s / answer) / slo.tpot_s + 0.5 * added)
        if load.context_s > load.belief.context_s:
            step_s *= 1.0 + (weights.lumps - 1.0) * (1.0 - load.belief.context_s / load.context_s)
        fuller = share + (new + part.decodes * request.output_tokens) / room
        return Terms(
            ttft=self._loss(first_s / patience_s(request, ask.now)),
            tpot=part.decodes * weights.tpot_weight * self._loss(step_s / slo.tpot_s),
            others=weights.others_weight * load.expected_tokens / answer * added * 3.0 * stand**2,
            work=weights.work_weight / slo.ttft_s * (work_s + weights.regret_weight * load.regret * fill_s),
            kv=weights.kv_weight * (fuller**3 - share**3),
        )

    def speeds(self, candidates: Sequence[Candidate]) -> Factors:
        """Factors on each candidate's times of prefill, of its attention besides, and of decode steps, by which those
        believed alike become so."""
        if not candidates:
            return [], [], []
        beliefs, alike = [candidate.load.belief for candidate in candidates], self.weights.alike
        return (
            level([belief.prefill for belief in beliefs], alike),
            level([belief.pairs for belief in beliefs], alike),
            level([belief.step for belief in beliefs], alike),
        )

    def _loss(self, share: float) -> float:
        """What using up that share of a budget costs, in requests lost."""
        kept = min(share, self.weights.late)
        return kept**3 + self.weights.overdue * (share - kept)


class _Asked:
    """What an ask and the weights bring to its price at every candidate, multiplied once. All are C doubles where this
    is compiled, and so are locals that are said to be floats (deploy/)."""

    __slots__ = (
        *("_beyond", "_decoded", "_kv_weight", "_late", "_later", "_lumps", "_now", "_oldest", "_others", "_overdue"),
        *("_own", "_per_tpot", "_per_ttft", "_prefills", "_prompt", "_regretted", "_stall", "_transfer_s", "_work"),
    )

    def __init__(self, weights: Priced, ask: Ask, part: Part) -> None:
        request, slo = ask.request, ask.request.slo
        self._late, self._overdue = weights.late, weights.overdue
        self._beyond = weights.late**3 - weights.overdue * weights.late
        self._now, self._oldest = ask.now, ask.now - weights.fresh_s
        self._prompt, self._later = request.prompt_tokens, part.decodes * request.output_tokens
        self._prefills, self._transfer_s = part.prefills, part.transfer_s
        self._per_ttft, self._per_tpot = 1.0 / patience_s(request, ask.now), 1.0 / slo.tpot_s
        self._decoded, self._own = part.decodes / slo.tpot_s, part.decodes * weights.tpot_weight
        self._others, self._stall = 3.0 * weights.others_weight * slo.tpot_s, weights.stall
        self._work, self._regretted = weights.work_weight / slo.ttft_s, weights.regret_weight
        self._kv_weight, self._lumps = weights.kv_weight, weights.lumps - 1.0

    def prices(self, candidates: Sequence[Candidate], cached: Sequence[int], factors: Factors) -> list[float]:
        """The totals of `explain`, unrolled, because every request pays for it: one call for all candidates."""
        fasts, evens, slows = factors
        known, found = len(cached), []
        prompt: float = self._prompt
        late: float = self._late
        shortest: float = SHORTEST
        load: EndpointLoad
        for at, candidate in enumerate(candidates):
            load = candidate.load
            fast: float = fasts[at]
            even: float = evens[at]
            slow: float = slows[at]
            held: float = cached[load.slot] if load.slot < known else 0
            token_s: float = load.token_s
            pair_s: float = load.pair_s
            fixed_s: float = load.fixed_s
            ready_at: float = load.ready_at
            step_s: float = load.step_s
            sequence_s: float = load.sequence_s
            context_s: float = load.context_s
            plain_s: float = load.belief.context_s
            expected: float = load.expected_tokens
            answers: float = load.answers or 1
            booked: float = load.kv_booked
            room: float = load.kv_tokens or UNKNOWN_KV_TOKENS
            regret: float = load.regret
            share: float = booked / room
            new = prompt - held
            fill_s = fast * new * (token_s + even * (held + 0.5 * new) * pair_s)
            work_s = self._prefills * fill_s
            wait_s: float = ready_at - self._now if ready_at > self._now else 0.0
            if load.strangers and load.scraped_at is not None and load.scraped_at >= self._oldest:
                wait_s += ahead(load) * work_s
                share = max(share, load.kv_usage or 0.0)
            begins_s: float = wait_s if prompt <= load.kv_free else max(wait_s, room_s(load, prompt))
            first = (self._transfer_s + begins_s + fixed_s + work_s) * self._per_ttft
            more = self._decoded * slow * (sequence_s + context_s * prompt)
            step = slow * step_s * self._per_tpot + more
            answer = expected / answers
            per_answer = self._per_tpot / (answer if answer > shortest else shortest)
            more += work_s * per_answer
            stand = step + self._stall * per_answer * wait_s + 0.5 * more
            if stand > late:
                stand = late
            if context_s > plain_s:  # stretched by others' prefills, and this is their part of a step
                step *= 1.0 + self._lumps * (1.0 - plain_s / context_s)
            fuller = share + (new + self._later) / room
            found.append(
                (first * first * first if first < late else self._beyond + self._overdue * first)
                + self._own * (step * step * step if step < late else self._beyond + self._overdue * step)
                + self._others * expected * per_answer * more * stand * stand
                + self._work * (work_s + self._regretted * regret * fill_s)
                + self._kv_weight * (fuller * fuller * fuller - share * share * share)
            )
        return found


def patience_s(request: Request, now: float) -> float:
    """What is left of the TTFT budget of a request that has waited at the gateway."""
    budget_s = request.slo.ttft_s
    waited_s = now - request.arrived_s if request.arrived_s else 0.0
    return max(LEAST_BUDGET * budget_s, budget_s - max(0.0, waited_s))


def ahead(load: EndpointLoad) -> int:
    """Requests that others sent and that the engine had not begun at the last scrape; each is taken to be like ours."""
    return min(load.strangers, load.waiting or 0)


def level(found: Sequence[Speed], alike: float) -> list[float]:
    """What to multiply each factor with to bring it to the median: either way by `alike` at most, and by what the
    factor itself may be off.

    Beliefs of equal endpoints differ by the noise of what was observed: only what is beyond noise may count. Else who
    is believed a little faster would get all the work that has no other preference; and so would who has shown nothing
    yet where the others turned out slower than their label, and it would show nothing under so much of it either, since
    decoding is only seen between prompts.
    """
    factors = [each.factor for each in found]
    ordered = sorted(factors)
    middle = ordered[len(ordered) // 2]
    times = [middle / factor for factor in factors]
    if ordered[-1] <= alike * middle <= alike * alike * ordered[0]:
        return times
    bounds = [alike * exp(SIGMAS * sqrt(each.var)) for each in found]
    return [min(most, max(1.0 / most, each)) for each, most in zip(times, bounds, strict=True)]
