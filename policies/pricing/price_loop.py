"""The loop that computes the prices of a request at the candidate endpoints of a pick.

It is the fast form of `PriceScorer.explain` in endpoint_price.py, where the terms are described.
The functions at the end compute single parts of a price for the loop and for `explain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Protocol

from policies.endpoint_load import EndpointLoad
from policies.engine.engine_model_updates import EngineTimeline
from policies.engine.running_answer_lengths import AgeGroup, per_token
from policies.latency.expected_latency import backlog_s, room_s
from policies.policy_types import WHOLE_REQUEST, PhaseShare
from policies.routing_types import Candidate, Request

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

# Every request reads these of all candidates: one call in C, in place of a loop.
_SLOTS = attrgetter("load.slots")

Row = tuple[Candidate, float, float, float, float]
"""A candidate, the factors on its speed of prefill, of its attention and of decode steps, and the
seconds of a KV transfer to or from it."""

PendingPrice = tuple[float, int, EndpointLoad, float, float, float, float]
"""A price without the harm to answers, its place among the prices, the load, and the arguments of
PriceLoop._harm_of_ranks."""


class PriceWeights(Protocol):
    """The parameters of the routing policy `priced` that the price computation reads."""

    @property
    def late(self) -> float: ...
    @property
    def overdue(self) -> float: ...
    @property
    def tpot_weight(self) -> float: ...
    @property
    def lumps(self) -> float: ...
    @property
    def others_weight(self) -> float: ...
    @property
    def work_weight(self) -> float: ...
    @property
    def regret_weight(self) -> float: ...
    @property
    def move_weight(self) -> float: ...
    @property
    def kv_weight(self) -> float: ...
    @property
    def fresh_s(self) -> float: ...


class PriceLoop:
    # The loop over candidates that computes the prices of one request, for one set of weights.
    #
    # Every request runs it. Of a partial price, all terms are left out without which it is above
    # another one already. All attributes are C doubles in the compiled module, and so are locals
    # annotated as float (deploy/). What the loop reads more than once is a local: an attribute
    # costs twice as much in the interpreter.

    __slots__ = (
        *("beyond", "fresh_s", "kv", "late", "lumps", "moved", "others", "overdue", "regret"),
        *("now", "per_budget", "per_tpot", "per_ttft", "prompt"),
        *("decoded", "later", "most", "own", "prefills", "tpot", "work"),
    )

    def __init__(self, weights: PriceWeights) -> None:
        self.late, self.overdue = weights.late, weights.overdue
        self.beyond = weights.late**3 - weights.overdue * weights.late
        self.fresh_s, self.lumps = weights.fresh_s, weights.lumps - 1.0
        self.tpot = weights.tpot_weight
        self.others, self.work = weights.others_weight, weights.work_weight
        self.regret, self.kv = weights.regret_weight, weights.kv_weight
        self.moved = weights.move_weight
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
        self.most = 0.0

    def set_most_cached(self, tokens: int) -> None:
        # Set how many of the tokens of a session's turn are cached at the endpoint with most of it.
        #
        # Only then, computing these elsewhere costs more.
        self.most = float(tokens)

    def prices(
        self, rows: Iterable[Row], cached: Sequence[int], usual: float, is_partial: bool = False
    ) -> list[float]:
        # Return the price at each candidate. `usual` is what usual_slots returns for them.
        known, prices, has_slots = len(cached), [], usual < inf
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
            known_s: float = max(0.0, load.prefill_done_at - self.now)
            if self.now > load.next_first_token_at:
                known_s = backlog_s(load, self.now)
            wait_s: float = known_s
            used: float = load.kv_used_tokens + 0.5 * load.expected_tokens
            room: float = load.kv_tokens or UNKNOWN_KV_TOKENS
            if load.external_requests and is_fresh(load, self.now - self.fresh_s):
                wait_s += waiting_external_requests(load) * work_s
                used = max(used, room * (load.kv_usage or 0.0))
            start_s = wait_s
            if has_slots or prompt > load.free_kv_tokens:
                start_s = max(wait_s, room_s(load, prompt), slot_wait_s(load, usual))
            first: float = (delay_s + start_s + load.fixed_ttft_s + work_s) * self.per_ttft
            price: float = first * first * first if first < late else self._loss(first)
            context_s: float = load.decode_s_per_context_token
            alone_s: float = load.belief.context_s  # below, prefill_share() without a call
            busy: float = 1.0 - alone_s / context_s if context_s > alone_s else 0.0
            moved: float = self.moved * (self.most - hit) / uncached if hit < self.most else 0.0
            work: float = (self.regret * load.eviction_regret + moved) * fill_s + busy * work_s
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
                full: float = min(FULLEST, used / room + grown)
                lack: float = grown * (answers + 1.0) * (full * full * full)
                lack = self.kv * (lack + slot_loss(load, usual) if has_slots else lack)
                if answers and price + lack + work <= lowest:
                    pace = (step - more) * (1.0 - 0.5 * busy)
                    lack += self.others * self._harm(load.timeline, pace, more, known_s, work_s)
                price += lack
            prices.append(price + work)
            lowest = prices[-1] if is_partial and prices[-1] < lowest else lowest
        return prices

    def prices_of_ranks(
        self, rows: Sequence[Row], cached: Sequence[int], usual: float, is_partial: bool
    ) -> list[float]:
        # Return the price at each candidate, of which some are ranks whose steps end together.
        #
        # The terms that need no other rank come first. The harm to the answers of all ranks takes
        # longest, so it is added to the cheapest candidates first.
        others, self.others = self.others, 0.0
        prices = self.prices(rows, cached, usual)
        self.others = others
        ranks: Sequence[EndpointLoad] = ()
        known, pending = len(cached), list[PendingPrice]()
        ahead_s: float = 0.0
        shares: float = 0.0
        for index, (candidate, fast, attention, slow, _) in enumerate(rows):
            load = candidate.load
            if not ranks or load.lockstep_ranks is not ranks:
                ranks = load.lockstep_ranks
                ahead_s = joint_backlog_s(ranks or (load,), self.now)
                shares = prefill_shares(ranks or (load,))
            hit = cached[load.slot] if load.slot < known else 0
            uncached = self.prompt - hit
            pairs_s = attention * (hit + 0.5 * uncached) * load.attention_s_per_pair
            work_s = self.prefills * fast * uncached * (load.prefill_s_per_token + pairs_s)
            known_s, busy = backlog_s(load, self.now), prefill_share(load)
            added_s = joint_work_s(len(ranks) or 1, ahead_s, known_s, work_s)
            context_s = load.decode_s_per_context_token * self.prompt
            more = self.decoded * slow * (load.decode_s_per_sequence + context_s)
            pace = slow * load.decode_s_per_token * self.per_tpot * (1.0 - 0.5 * busy)
            price = prices[index] + self.work * (shares - busy) * added_s * self.per_budget
            prices[index] = price
            pending.append((price, index, load, pace, more, ahead_s, added_s))
        self._add_harm_of_ranks(pending, prices, is_partial)
        return prices

    def _add_harm_of_ranks(
        self, pending: list[PendingPrice], prices: list[float], is_partial: bool
    ) -> None:
        lowest: float = inf
        for price, index, load, pace, more, wait_s, work_s in sorted(pending):
            if is_partial and price > lowest:
                break
            price += self.others * self._harm_of_ranks(load, pace, more, wait_s, work_s)
            prices[index], lowest = price, min(lowest, price)

    def _harm_of_ranks(
        self, load: EndpointLoad, pace: float, more: float, wait_s: float, work_s: float
    ) -> float:
        # Return the loss that a request causes to the answers of all ranks that step with one.
        harm: float = 0.0
        for rank in load.lockstep_ranks or (load,):
            if rank.answers:
                if self.now >= rank.timeline.answers_due_at:
                    rank.timeline.update_answers(rank, self.now)
                own: float = more if rank is load else 0.0
                harm += self._harm(rank.timeline, pace, own, wait_s, work_s)
        return harm

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
        # Return the loss of answers of one age, some of which may be late.
        #
        # Late answers lose in proportion to their time, so _loss() is used, not a cube.
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
    """Return the share (0 to 1) of an endpoint's time that prefills of later requests will take.

    A running answer is slowed down by half of these prefills: on average, half of its tokens are
    already generated.
    """
    context_s: float = load.decode_s_per_context_token
    if context_s > load.belief.context_s:  # stretched by prefills
        return 1.0 - load.belief.context_s / context_s
    return 0.0


def patience_s(request: Request, now: float) -> float:
    """Return how many seconds a request may still wait for its first token within its TTFT budget.

    A nearly used-up budget counts as LEAST_BUDGET of the whole one.
    """
    budget_s = request.slo.ttft_s
    waited_s = now - request.arrived_s if request.arrived_s else 0.0
    return max(LEAST_BUDGET * budget_s, budget_s - max(0.0, waited_s))


def is_turn(request: Request, part: PhaseShare) -> bool:
    """Return whether a request is one of a session, and one endpoint would serve all of it."""
    return bool(request.session) and part.prefills > 0.0 and part.decodes > 0.0


def most_cached(candidates: Sequence[Candidate], cached: Sequence[int]) -> int:
    """Return the largest number of prompt tokens that any of the candidates has cached.

    cached  that number by slot
    """
    known, most = len(cached), 0
    for candidate in candidates:
        slot = candidate.load.slot
        if slot < known and cached[slot] > most:
            most = cached[slot]
    return most


def waiting_external_requests(load: EndpointLoad) -> int:
    """Return the number of requests from outside the gateways that still waited at the last
    scrape.
    """
    return min(load.external_requests, load.waiting or 0)


def usual_slots(candidates: Sequence[Candidate]) -> float:
    """Return how many sequences (slots) to assume for an endpoint whose own number is unknown.

    The result is the largest number that is known of any candidate; inf if none is known.
    """
    shown: list[float] = list(map(_SLOTS, candidates))
    if min(shown, default=inf) == inf:
        return inf
    return max(slots for slots in shown if slots < inf)


def slot_wait_s(load: EndpointLoad, usual: float) -> float:
    """Return how many seconds one more request would wait until the engine can run it.

    An engine runs a limited number of sequences at once (slots). Returns 0 if one is free. `usual`
    is the number of slots of an endpoint that has not shown its own.
    """
    slots = min(load.slots, usual)
    missing = load.in_flight + 1 - slots
    if missing <= 0.0:
        return 0.0
    answer_s = load.expected_tokens / (load.answers or 1) * load.decode_s_per_token
    return missing * answer_s / slots


def slot_loss(load: EndpointLoad, usual: float) -> float:
    """Estimate how many later requests will find no free slot if one more request runs here.

    Slots are the sequences that an engine can run at once. The estimate is their used share to the
    power of 4. `usual` is the number of slots of an endpoint that has not shown its own.
    """
    crowd: float = min(FULLEST, (load.in_flight + 1) / min(load.slots, usual))
    return crowd * crowd * crowd * crowd


def is_fresh(load: EndpointLoad, oldest: float) -> bool:
    """Return whether an endpoint's metrics are recent: scraped at the time `oldest` or later."""
    return load.scraped_at is not None and load.scraped_at >= oldest


# Ranks of an engine that begin and end their steps together


def joint_backlog_s(ranks: Sequence[EndpointLoad], now: float) -> float:
    """Return the seconds until all ranks of an engine have computed their queued prompts."""
    longest_s: float = 0.0
    for load in ranks:
        longest_s = max(longest_s, backlog_s(load, now))
    return longest_s


def prefill_shares(ranks: Sequence[EndpointLoad]) -> float:
    """Return the sum of prefill_share() over the ranks of one engine."""
    total: float = 0.0
    for load in ranks:
        total += prefill_share(load)
    return total


def joint_work_s(ranks: int, ahead_s: float, known_s: float, work_s: float) -> float:
    """Return the seconds by which a prefill at one rank lengthens the work of all ranks together.

    ranks    number of data-parallel ranks, which step together
    ahead_s  seconds until all ranks have computed their prompts
    known_s  seconds until the rank that is priced has computed its prompts
    work_s   seconds of the prefill

    The ranks compute prompts at the same time. So a prefill adds no time while another rank
    computes prompts for longer. But all ranks share the work of experts, so the result is at least
    `work_s / ranks`.
    """
    return max(work_s / ranks, known_s + work_s - ahead_s)
