"""The price of serving a request at an endpoint: what it is expected to cost everybody in kept promises.

Lives here: the terms of the price, the policy `priced` that picks the cheapest endpoint, and the two halves of a price
that splitting puts together (split.py). Not here: beliefs about time (latency.py, timeline.py), admission, pairs.
docs/how-the-price-works.md explains it without code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from policies import pickers
from policies.contract import Policy, Weighted
from policies.latency import prefill_s
from policies.model import Ask, Candidate, EndpointLoad, Request
from policies.presets import ORDINARY, Preset

LEAST_BUDGET = 0.05
"""Share of the TTFT budget that is reckoned with when more than the rest was spent waiting at the gateway."""

UNKNOWN_KV_TOKENS = 500_000.0
"""KV tokens that an endpoint is taken to hold until it says so."""


class Priced(Preset, frozen=True):
    """The cheapest endpoint: least loss of promises, this request's own and everybody else's, in one currency.

    One unit is one request that uses up exactly its budget. Every delay is a share of a budget; its loss is the share
    cubed, so small delays are nearly free, and it stops growing at `late` budgets: a request that is lost anyway
    should not push others aside. The price of an endpoint is the sum of

        ttft    loss of this request's own first token: queue + prefill, over what is left of its TTFT budget
        tpot    tpot_weight x loss of its own decoding: expected step time over its TPOT budget
        others  others_weight x what its prefill and its sequence add to the loss of each request that decodes there
        work    work_weight x prefill over the TTFT budget, raised by regret_weight x the share of this endpoint's
                evictions that were asked for again: seconds that nobody else gets, and cache that somebody loses
        kv      kv_weight x what its KV adds to the cube of the share of memory that is booked; this one never stops

    fresh_s: how old a scrape may be to be believed, seconds. Own bookings come first; a scrape only tells of strangers.

    Kin: opportunity costs of online routing (Awerbuch, Azar, Plotkin 1993), Mooncake's TTFT and LMetric's product are
    its first-order cases; saturation is what JITServe's density does for deadlines that cannot be met.
    """

    late: float = 1.35
    tpot_weight: float = 2.0
    others_weight: float = 4.0
    work_weight: float = 1.0
    regret_weight: float = 0.0
    kv_weight: float = 0.1
    fresh_s: float = 5.0

    def __post_init__(self) -> None:
        if not (self.late >= 1.0 and self.fresh_s >= 0.0):
            raise ValueError(f"late is 1 or more and fresh_s not negative, not {self.late}, {self.fresh_s}")
        weights = (self.tpot_weight, self.others_weight, self.work_weight, self.regret_weight, self.kv_weight)
        if not all(0.0 <= weight < 1e6 for weight in weights):
            raise ValueError(f"weights are not negative and below a million, not {weights}")

    def build(self) -> Policy:
        prices = Prices(self)
        return Policy(
            name="priced",
            filters=ORDINARY,
            scorers=(Weighted(prices.scores),),
            picker=pickers.best,
            reads_prefix=True,
            terms=prices.terms,
        )


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


class Part(msgspec.Struct, frozen=True):
    """What of a request an endpoint would do: 1 or 0 each. `transfer_s`: until its KV is where it will be decoded."""

    prefills: float = 1.0
    decodes: float = 1.0
    transfer_s: float = 0.0


WHOLE = Part()
DECODE = Part(prefills=0.0)


class Prices:
    """The price function of one set of weights. Stateless; `prices` is the hot path, about 1 us per candidate."""

    __slots__ = ("weights",)

    def __init__(self, weights: Priced) -> None:
        self.weights = weights

    def scores(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """Negative prices of serving the whole request, aligned with the candidates."""
        return [-price for price in self.prices(ask, candidates)]

    def cheapest(self, ask: Ask, candidates: Sequence[Candidate]) -> float:
        """The price of the best that can be done now: what holding or refusing has to be weighed against."""
        return min(self.prices(ask, candidates))

    def terms(self, ask: Ask, candidate: Candidate) -> Mapping[str, float]:
        """What the price of serving all of it there is made of, by name: for explaining a pick."""
        return msgspec.structs.asdict(self.explain(ask, candidate))

    def prices(self, ask: Ask, candidates: Sequence[Candidate], part: Part = WHOLE) -> list[float]:
        """Prices aligned with the candidates: the totals of `explain`, unrolled, because every request pays for it."""
        weights, request, now, cached = self.weights, ask.request, ask.now, ask.cached
        prompt, output, known, late = request.prompt_tokens, request.output_tokens, len(cached), weights.late
        most, oldest, own = late * late * late, now - weights.fresh_s, part.decodes * weights.tpot_weight
        prefills, decodes, others_weight, kv_weight = (
            part.prefills,
            part.decodes,
            weights.others_weight,
            weights.kv_weight,
        )
        work_weight, regret_weight = weights.work_weight / request.slo.ttft_s, weights.regret_weight
        per_ttft, per_tpot = prefills / patience_s(request, now), 1.0 / request.slo.tpot_s
        per_output, found = per_tpot / (output or 1), []
        for candidate in candidates:
            load = candidate.load
            held = cached[load.slot] if load.slot < known else 0
            new, room = prompt - held, load.kv_tokens or UNKNOWN_KV_TOKENS
            work_s = prefills * new * (load.token_s + (held + 0.5 * new) * load.pair_s)
            wait_s, share = load.ready_at - now, load.kv_booked / room
            if load.strangers and load.scraped_at is not None and load.scraped_at >= oldest:
                wait_s = (wait_s if wait_s > 0.0 else 0.0) + ahead(load) * work_s
                share = max(share, load.kv_usage or 0.0)
            first_s = part.transfer_s + load.fixed_s + work_s
            first = (first_s + wait_s if wait_s > 0.0 else first_s) * per_ttft
            added_s = decodes * (load.sequence_s + load.context_s * prompt)
            step = (load.step_s + added_s) * per_tpot
            slower = step + work_s * per_output
            loss = step * step * step if step < late else most
            fuller = share + (new + decodes * output) / room
            found.append(
                (first * first * first if first < late else most)
                + own * loss
                + others_weight * load.decoding * ((slower * slower * slower if slower < late else most) - loss)
                + work_weight * work_s * (1.0 + regret_weight * load.regret)
                + kv_weight * (fuller * fuller * fuller - share * share * share)
            )
        return found

    def explain(self, ask: Ask, candidate: Candidate, part: Part = WHOLE) -> Terms:
        """One candidate's price in its parts; the same arithmetic as `prices`, to be read."""
        weights, request, load = self.weights, ask.request, candidate.load
        held = ask.cached[load.slot] if load.slot < len(ask.cached) else 0
        new, slo = request.prompt_tokens - held, request.slo
        work_s = part.prefills * prefill_s(load, new, held)
        wait_s, share = max(0.0, load.ready_at - ask.now), booked_share(load)
        if load.strangers and load.scraped_at is not None and load.scraped_at >= ask.now - weights.fresh_s:
            wait_s += ahead(load) * work_s
            share = max(share, load.kv_usage or 0.0)
        first_s = part.transfer_s + load.fixed_s + work_s + wait_s
        added_s = part.decodes * (load.sequence_s + load.context_s * request.prompt_tokens)
        step_s = load.step_s + added_s
        loss, slower_s = self._loss(step_s / slo.tpot_s), step_s + work_s / max(1, request.output_tokens)
        fuller = share + (new + part.decodes * request.output_tokens) / (load.kv_tokens or UNKNOWN_KV_TOKENS)
        return Terms(
            ttft=self._loss(part.prefills * first_s / patience_s(request, ask.now)),
            tpot=part.decodes * weights.tpot_weight * loss,
            others=weights.others_weight * load.decoding * (self._loss(slower_s / slo.tpot_s) - loss),
            work=weights.work_weight * work_s / slo.ttft_s * (1.0 + weights.regret_weight * load.regret),
            kv=weights.kv_weight * (fuller**3 - share**3),
        )

    def _loss(self, share: float) -> float:
        """What using up that share of a budget costs, in requests lost."""
        return float(min(share, self.weights.late) ** 3)


def patience_s(request: Request, now: float) -> float:
    """What is left of the TTFT budget of a request that has waited at the gateway."""
    budget_s = request.slo.ttft_s
    waited_s = now - request.arrived_s if request.arrived_s else 0.0
    return max(LEAST_BUDGET * budget_s, budget_s - max(0.0, waited_s))


def booked_share(load: EndpointLoad) -> float:
    """Share of the endpoint's KV that is booked; above 1 when shared prefixes are booked by all who share them."""
    return load.kv_booked / (load.kv_tokens or UNKNOWN_KV_TOKENS)


def ahead(load: EndpointLoad) -> int:
    """Requests that others sent and that the engine had not begun at the last scrape; each is taken to be like ours."""
    return min(load.strangers, load.waiting or 0)
