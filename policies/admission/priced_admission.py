"""Admission by price: overload refuses the requests with the least value per second of work.

While queues are short, the price is zero and all requests enter. When the expected queue exceeds a
share of the TTFT budget, the price grows exponentially: it is the dual variable of the pool's
capacity (docs/admission.md). The queue itself sums up excess arrivals, so the price needs no
memory and does not oscillate. The order of waiting requests is in wait_queue.py, the limit on
sessions in adaptive_session_limit.py, and scheduled retries in retry_after.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import expm1, inf, pow

from policies.admission.adaptive_session_limit import (
    SessionGate,
    WorkingSet,
    fleet_kv_tokens,
    is_continuation,
)
from policies.admission.admission_policy import (
    ADMIT,
    Admission,
    AdmissionParams,
    RequestOutcome,
    Shed,
    Verdict,
    Wait,
    WaitQueueView,
)
from policies.admission.full_pool_rate import FullLoadRate
from policies.admission.prefill_pacing import PrefillPace
from policies.admission.refusals import shed_early, shed_no_capacity, shed_past_deadline, shed_until
from policies.admission.retry_after import ReturnSchedule, ReturnTimes, request_key
from policies.admission.session_refusals import SessionLimit
from policies.admission.tenant_demand import TenantDemand
from policies.latency.expected_latency import prefill_s
from policies.param_types import Exponent, Fraction, NonNegative, Positive
from policies.pricing.admission_cost import (
    CostEstimate,
    decode_work_s,
    estimate_cost,
    remaining_ttft_s,
)
from policies.routing_types import STANDARD, Candidate, Pick, Request, RoutingQuery

LEARN = 0.02
"""Weight (0 to 1) of one new admitted request in the running means over admitted requests."""

PASSING = 4.0
"""Limit on how far prompts may exceed the allowed prefill pace while there is no overload.

The limit is this multiple of `burst_s`, for the mean excess of the endpoints (PrefillPace). Beyond
it, requests wait. Under full overload the multiple is 1, because only a short burst drains by
itself.
"""

EFFICIENCY = 1.0
"""Initial guess of how many seconds of predicted work one endpoint completes per second.

It is used until an overload has shown the real value.
"""

TIGHTER = 10.0
"""Limit on how much a tight latency budget may raise the price of admission.

A budget counts as at most this many times tighter than the typical one. Clients choose their
budgets, and an impossible one must not raise the price for others.
"""


class PricedAdmissionParams(AdmissionParams, frozen=True):
    """The parameters of an admission policy that refuses less valuable requests under overload.

    The price of admission rises with the queue. A request is refused if its value is less than the
    price of its work. The budgets are those of the request's service class.

    full_load      the pool counts as overloaded if more work is requested than this multiple of its
                   capacity
    overload       multiple from which the pool counts as fully overloaded; between full_load and
                   overload, the limits change gradually
    burst_share    without overload, admission is free while the mean queue is shorter than this
                   share of the TTFT budget
    queue_share    the same share in a fully overloaded pool
    doubt          number of standard deviations that are subtracted from the requested work before
                   it is compared, because a few long prompts by chance are not an overload
    steepness      how fast the price grows when the queue exceeds the free share
    bend           exponent of a request's work in its price, 0 to 1. Below 1, long prompts pay less
                   than in proportion to their work; at 0, all requests pay the same
    hold_share     a request leaves the wait queue only while some endpoint's queue is shorter than
                   this share of its TTFT budget
    hold_least_s   minimum of that queue limit, in seconds
    step_share     share of the TPOT budget that running answers may need while prompts are computed
                   beside them; the rest is a margin
    burst_s        seconds of prefill by which an endpoint may exceed the pace that step_share
                   allows
    immodest       factor on the queue limit and on burst_s for a tenant above its fair share
    modest         number added to that factor for a tenant below its fair share
    kv_share       share of the fleet's KV that may be reserved before requests pay a price
    late_value     value of a request whose first token is expected too late; one in time has value
                   1
    session_value  value of a request that continues a conversation; one that starts has value 1
    weights        relative shares of tenants; 1 for tenants that are not listed
    sessions       parameters of the limit on sessions
    returns        parameters of the schedule of retries
    """

    queue_share: Positive = 0.3
    overload: Positive = 1.3
    burst_share: Positive = 0.8
    full_load: Positive = 1.1
    doubt: NonNegative = 1.5
    steepness: Exponent = 4.0
    bend: Fraction = 0.8
    hold_share: NonNegative = 0.2
    hold_least_s: NonNegative = 0.6
    step_share: Positive = 0.85
    burst_s: Positive = 1.5
    modest: Positive = 3.0
    immodest: Positive = 0.3
    kv_share: Positive = 1.0
    late_value: NonNegative = 0.2
    session_value: Positive = 20.0
    weights: Mapping[str, Positive] = {}
    sessions: SessionGate = SessionGate()
    returns: ReturnTimes = ReturnTimes()

    def __post_init__(self) -> None:
        if not self.full_load < self.overload:
            raise ValueError(
                f"overload ({self.overload}) must be greater than full_load ({self.full_load})"
            )

    def build(self) -> Admission:
        return PricedAdmission(self)


class PricedAdmission:
    """Decides which requests enter a pool, by a price that rises with the expected queue.

    A request is refused if its value is less than the price of its work.

    is_calm  whether every request may enter as long as a permit is free: there is no queue, no
             limit on sessions, and no reservation for retries
    price    the current price; at 1, half of the requests of typical value and work are refused
    """

    __slots__ = (
        *(
            "_ahead_s",
            "_budget",
            "_full_rate",
            "_schedule",
            "_kv_reserved",
            "_limit",
            "_overload",
            "_pace",
            "_prefill_share",
            "_per_weight",
            "_rule",
            "_sessions",
            "_tpot_budget",
            "_typical_s",
            "_usage",
        ),
        *("is_calm", "name", "price", "reads_forecast", "reads_sessions"),
    )

    def __init__(self, rule: PricedAdmissionParams) -> None:
        self.name = "priced"
        self.is_calm = self.reads_forecast = self.reads_sessions = True
        self.price = 0.0
        self._rule = rule
        self._limit = SessionLimit(rule.sessions)
        self._sessions = self._limit.sessions
        self._schedule, self._full_rate = ReturnSchedule(rule.returns), FullLoadRate()
        self._prefill_share, self._kv_reserved = 1.0, 0.0
        self._overload = self._ahead_s = 0.0
        self._pace = PrefillPace(rule.step_share)
        self._usage = TenantDemand(rule.weights)
        self._budget: float | None = None
        self._tpot_budget: float | None = None
        self._typical_s: float | None = None
        self._per_weight: float | None = None

    @property
    def sessions(self) -> WorkingSet:
        """Return the active sessions, whose contexts together must fit the fleet's KV memory."""
        return self._sessions

    # Verdicts

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        if queue.capacity <= 0:
            return shed_no_capacity()
        estimate = estimate_cost(query, candidates)
        if not estimate.count:
            return shed_no_capacity()
        self._reprice(estimate, queue)
        key = request_key(query) if queue.is_new_arrival and len(self._schedule) else None
        early_s = self._schedule.seconds_early(key, query.now) if self.price else None
        if early_s is not None:
            return shed_early(early_s)
        # Capacity is reserved for a request that returns in time, so it need not wait again.
        is_reserved = self._schedule.is_due(key, query.now)
        shed = (
            self._refusal(query, candidates, estimate, queue, is_reserved)
            if queue.is_new_arrival
            else self._refuse_late(query, estimate, queue)
        )
        if shed is not None:
            self._usage.record(query.request.tenant, estimate.work_s, admitted=False)
            return shed
        if is_reserved or not self.price:
            self._schedule.remove(key)
        turn = is_reserved or not queue.is_new_arrival or queue.is_next(query.request.tenant)
        if (
            turn
            and queue.busy_permits < queue.capacity
            and (is_reserved or self._can_start_soon(query, candidates, estimate.count))
        ):
            return ADMIT
        return Wait(queue.limits.timeout_s, is_reserved)

    def _refusal(
        self,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        estimate: CostEstimate,
        queue: WaitQueueView,
        is_reserved: bool,
    ) -> Shed | None:
        # Return the refusal of a new request that may not even wait in the queue.
        #
        # Return None if it may wait.
        request = query.request
        wait_s = self._wait_s(request.tenant, estimate, queue)
        first_s = estimate.ttft_s + wait_s
        patience_s = inf if request.deadline_s is None else request.deadline_s - query.now
        if first_s > patience_s:
            return shed_past_deadline(queue, first_s, patience_s)
        refused = self._limit.refusal(query, candidates, estimate.cached_tokens)
        if refused is not None:
            return refused
        self._learn(query, estimate)
        if is_reserved or not self.price or not request.slo.is_promised:
            return None
        price = self._relative_price(query, estimate, first_s)
        if query.rng.random() * (1.0 + price) < 1.0:
            return None
        return self._refuse_by_price(query, estimate, queue, price)

    def _relative_price(self, query: RoutingQuery, estimate: CostEstimate, first_s: float) -> float:
        # Return the price of the request's work divided by its value.
        #
        # A request with relative price r is admitted with probability 1 / (1 + r).
        request, rule = query.request, self._rule
        weight = request.slo.weight
        value = 2.0**request.priority * weight * (self._per_weight or 1.0 / weight)
        if first_s > remaining_ttft_s(query):
            value *= rule.late_value
        if self._sessions.contains(request.session) or is_continuation(
            request.prompt_tokens, estimate.cached_tokens
        ):
            value *= rule.session_value
        work = pow(estimate.work_s / max(1e-9, self._typical_s or estimate.work_s), rule.bend)
        return self.price * self._usage.price_share(request.tenant) * work / max(1e-9, value)

    def _refuse_by_price(
        self, query: RoutingQuery, estimate: CostEstimate, queue: WaitQueueView, price: float
    ) -> Shed:
        queue_s = estimate.queue_s + self._queue_work_s(estimate, queue)
        threshold_s = self._threshold_s()
        retry_after_s = self._retry_after(query, estimate, queue, queue_s - threshold_s)
        text = (
            f"The fleet is overloaded: {queue_s:.1f} s of prompts are queued for each of "
            f"{estimate.count} endpoints, and beyond {threshold_s:.1f} s requests pay a price. "
            f"This request takes {estimate.work_s:.2f} s of work; "
            f"one in {1.0 + price:.1f} of such requests is admitted."
        )
        return shed_until("price", retry_after_s, text)

    def _refuse_late(
        self, query: RoutingQuery, estimate: CostEstimate, queue: WaitQueueView
    ) -> Shed | None:
        # Return the refusal of a waiting request that would miss its TTFT budget.
        #
        # Return None if it may wait. It is refused only under overload, where its work would delay
        # requests that can still be in time.
        due_s = remaining_ttft_s(query)
        if (
            not self.price
            or not query.request.slo.is_promised
            or estimate.ttft_s <= due_s
            or estimate.prefill_s > query.request.slo.ttft_s
        ):
            return None
        due = f"The first token was due in {max(0.0, due_s):.1f} s"
        text = f"{due} and is expected in {estimate.ttft_s:.1f} s"
        running = f"The pool has {queue.busy_permits} of at most {queue.capacity} requests running"
        retry_after_s = self._retry_after(query, estimate, queue, estimate.ttft_s - due_s)
        return shed_until(
            "ttft",
            retry_after_s,
            f"{text}. {running}.",
        )

    # The price

    def _reprice(self, estimate: CostEstimate, queue: WaitQueueView) -> None:
        # Update the price: low for short excesses, so that a burst costs little, then exponential.
        rule = self._rule
        demand = self._usage.demand(queue.waiting_s, rule.doubt) / (
            estimate.count * self._prefill_share
        )
        self._overload = min(
            1.0, max(0.0, (demand - rule.full_load) / (rule.overload - rule.full_load))
        )
        queued = (estimate.queue_s + self._queue_work_s(estimate, queue)) / self._threshold_s()
        excess = rule.steepness * min(
            4.0, max(0.0, queued - 1.0, self._kv_reserved / rule.kv_share - 1.0)
        )
        self.price = expm1(excess) - excess

    def _queue_work_s(self, estimate: CostEstimate, queue: WaitQueueView) -> float:
        return queue.waiting_s / (estimate.count * self._prefill_share)

    def _threshold_s(self) -> float:
        # Return the mean queue per endpoint, in seconds of prefill, up to which the price is zero.
        #
        # The threshold is high for a burst, which drains by itself, and low for a queue that
        # persists because of overload.
        rule, budget_s = self._rule, 1.0 / self._budget if self._budget else STANDARD.ttft_s
        share = rule.burst_share + (rule.queue_share - rule.burst_share) * self._overload
        return max(1e-9, budget_s * share)

    def _can_start_soon(
        self, query: RoutingQuery, candidates: Sequence[Candidate], count: int
    ) -> bool:
        # Return whether a candidate would start the request soon without slowing its running
        # answers.
        #
        # Without any promised budget every request may begin immediately. The policy may pick
        # another candidate, so the excess of all endpoints together is bounded as well. Tenants
        # below their fair share may exceed the pace further than tenants above it.
        slo, rule = query.request.slo, self._rule
        if self._budget is None and not slo.is_promised:
            return True
        leniency = 1.0
        if self._usage.has_several_tenants:
            leniency = rule.immodest + rule.modest * (
                1.0 - self._usage.price_share(query.request.tenant)
            )
        bursts = leniency * (PASSING - (PASSING - 1.0) * self._overload)
        if self._ahead_s > bursts * rule.burst_s * count:
            return False
        until = query.now + leniency * max(rule.hold_least_s, rule.hold_share * slo.ttft_s)
        for candidate in candidates:
            load = candidate.load
            if (
                load.is_available
                and load.prefill_done_at <= until
                and self._pace.ahead_s(load, slo.tpot_s, query.now) <= leniency * rule.burst_s
            ):
                return True
        return False

    def _wait_s(self, tenant: str, estimate: CostEstimate, queue: WaitQueueView) -> float:
        # Return the expected seconds that a new request of the tenant would wait in the queue.
        if not queue.waiting:
            return 0.0
        return self._queue_work_s(estimate, queue) * min(
            1.0, queue.count_ahead(tenant) / queue.waiting
        )

    def _retry_after(
        self, query: RoutingQuery, estimate: CostEstimate, queue: WaitQueueView, excess_s: float
    ) -> float | None:
        # Return the seconds after which a refused client should retry, and reserve capacity for it.
        #
        # The time is the first unreserved moment after the queue has become shorter by `excess_s`.
        # Return None, without a reservation, if the client would not retry or the capacity is
        # unknown.
        if not query.can_return or not estimate.count or queue.drain_rate.per_s(query.now) is None:
            return None
        # Count work when it enters and not when it ends: answers are long, so their ends would show
        # a surge late.
        self._full_rate.learn(query.now, self._usage.admitted_per_s / estimate.count)
        capacity = estimate.count * (self._full_rate.per_unit or EFFICIENCY)
        return self._schedule.schedule(
            request_key(query), estimate.work_s, capacity, 2.0 * excess_s, query
        )

    def retry_after_s(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> float | None:
        """Reserve capacity for the retry of a refused request, and return the seconds until then.

        The result is inf if the client should not retry, and None if no rate was measured yet.
        """
        return self._retry_after(query, estimate_cost(query, candidates), queue, 0.0)

    # The running means that the policy learns

    def _learn(self, query: RoutingQuery, estimate: CostEstimate) -> None:
        # Update the running means of the typical TTFT budget, weight and work of a request.
        #
        # Budget and weight use harmonic means, in which tight budgets and light weights count most.
        slo = query.request.slo
        if slo.is_promised:
            self._budget = _typical(self._budget, slo.ttft_s, STANDARD.ttft_s)
        self._typical_s = _mean(self._typical_s, estimate.work_s)
        self._per_weight = _mean(self._per_weight, 1.0 / slo.weight)

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        request, load = query.request, pick.candidate.load
        missing = max(1, request.prompt_tokens - pick.cached_tokens)
        fill_s = prefill_s(load, missing, pick.cached_tokens)
        work_s = fill_s + decode_work_s(load, request.prompt_tokens, request.output_tokens)
        self._tpot_budget = _typical(self._tpot_budget, request.slo.tpot_s, STANDARD.tpot_s)
        self._usage.record(request.tenant, work_s, admitted=True)
        self._limit.on_reserved(query, pick)
        self._ahead_s += fill_s
        ahead_s = self._pace.record(load, fill_s, request.slo.tpot_s, query.now)
        if (
            request.session
            or ahead_s > 0.5 * self._rule.burst_s
            or load.prefill_done_at - query.now > self._rule.hold_least_s
        ):
            self.is_calm = False

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        self._limit.on_ended(request, outcome)

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        self._sessions.tick(now)
        self._usage.tick(now)
        self._schedule.expire(now)
        self._kv_reserved = _kv_reserved(candidates)
        tpot_s = 1.0 / self._tpot_budget if self._tpot_budget else STANDARD.tpot_s
        self._prefill_share = self._pace.mean_share(candidates, tpot_s)
        loads = [candidate.load for candidate in candidates if candidate.load.is_available]
        aheads_s = [self._pace.ahead_s(load, tpot_s, now) for load in loads]
        self._ahead_s = sum(aheads_s)
        queue_s = sum(max(0.0, load.prefill_done_at - now) for load in loads) / max(1, len(loads))
        self.is_calm = (
            not len(self._sessions)
            and not len(self._schedule)
            and queue_s < 0.5 * self._rule.hold_least_s
            and max(aheads_s, default=0.0) <= 0.5 * self._rule.burst_s
            and self._kv_reserved < self._rule.kv_share
        )
        if self.is_calm:
            self.price = 0.0


def _kv_reserved(candidates: Sequence[Candidate]) -> float:
    # Return the share of the fleet's KV that reserved requests need, with shared prefixes counted
    # once.
    #
    # Return 0 if the size of the KV is unknown.
    kv_tokens = fleet_kv_tokens(candidates)
    loads = [candidate.load for candidate in candidates if candidate.load.is_available]
    return (
        sum(load.timeline.kv_ratio * load.kv_reserved for load in loads) / kv_tokens
        if kv_tokens
        else 0.0
    )


def _typical(mean: float | None, budget_s: float, standard_s: float) -> float:
    # Return the running mean of 1 / budget after a request with the TTFT budget `budget_s`.
    #
    # The first request is compared with `standard_s`, and one tight budget can only move the mean a
    # bounded step.
    known = 1.0 / standard_s if mean is None else mean
    return _mean(mean, min(1.0 / budget_s, TIGHTER * known))


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + LEARN * (value - mean)
