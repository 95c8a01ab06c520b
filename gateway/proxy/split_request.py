"""The attempts of a request that may be split: asks the policy, then uses a pair or one endpoint.

policies/pricing/split_decision.py decides for every attempt, and policies/pricing/pull_decision.py
whether the endpoint first fetches the cached beginning of the prompt from another one. If two
endpoints take part, gateway/disagg/pair_attempt.py performs the attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from gateway.disagg.failure_actions import KV_FAILURES
from gateway.disagg.leg_requests import SplitContext
from gateway.disagg.pair_attempt import PairAttempt
from gateway.disagg.pairing import SplitRoute
from gateway.http.client_interface import Client
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.split_eligibility import (
    can_be_pulled,
    split_shape,
    unsplittable_error,
)
from gateway.protocol.response.relay import UpstreamError
from gateway.proxy.attempt_loop import AttemptPlan
from gateway.proxy.final_errors import no_endpoint_error
from gateway.proxy.retry_permission import permit_retry
from gateway.proxy.whole_request import WholePlan, pick_longest
from gateway.request_record import Exchange, SplitRecord
from gateway.routes_and_snapshot import Gateway, Route
from policies import routing_algorithm
from policies.pricing.pull_decision import cheaper_pull
from policies.pricing.split_decision import EndpointPair, SplitDecision, SplitReason
from policies.routing_types import Pick, RoutingQuery

SplitAttempts = AttemptPlan[Pick | EndpointPair]
"""The type of a SplitPlan for the attempt loop: it picks one endpoint or a pair of them.

It is written out because the type checker cannot infer such a union.
"""


class SplitPlan:
    """A request of a model with a `split` section, attempted until its answer begins.

    Each attempt uses a prefill and a decode endpoint, or one endpoint for the whole request.

    _whole             the plan that attempts the whole request at one endpoint
    _query             the policy's input at the newest choice of endpoints
    _decision          whether and why the newest choice splits the request
    _recompute         whether the next attempt should compute the whole request at one endpoint,
                       because a KV handoff failed
    """

    __slots__ = (
        "_context",
        "_decision",
        "_query",
        "_recompute",
        "_route",
        "_whole",
        "exchange",
        "gateway",
    )

    def __init__(
        self,
        gateway: Gateway,
        exchange: Exchange,
        client: Client,
        route: Route,
        call: Call,
        split: SplitRoute,
    ) -> None:
        fingerprint = exchange.fingerprint
        if fingerprint is None:
            fingerprint = exchange.fingerprint = gateway.endpoints.prefixes.fingerprint(
                call, route.name
            )
        self.gateway, self.exchange, self._route = gateway, exchange, route
        self._context = SplitContext(gateway, route, split, exchange, client, call, fingerprint)
        self._whole = WholePlan(gateway, exchange, client, route, call)
        self._recompute = False

    def choose(self, left_out: Sequence[str]) -> EndpointPair | Pick | None:
        context = self._context
        endpoints, request = context.gateway.endpoints, context.call.request
        query = self._query = endpoints.build_query(request, context.fingerprint, left_out)
        decision = self._decision = self._decide(query)
        return decision.pair or self._pick_alone(query)

    def _decide(self, query: RoutingQuery) -> SplitDecision:
        context = self._context
        pools, handoffs = context.split.pools, context.gateway.handoffs
        mode = handoffs.splitting.get(self._route.name, False)
        if self._recompute and any(candidate.load.is_available for candidate in pools.alone):
            return SplitDecision(None, SplitReason.RECOMPUTE, mode)
        shape = split_shape(context.call)
        splitter, transfers = context.split.splitter, handoffs.transfer_times
        decision = splitter.decide(pools, query, shape, mode, transfers)
        pricer = context.split.pull_pricer
        # A retry computes the prompt: a pull has failed, or endpoints are missing.
        if pricer is None or query.failed_endpoints or not can_be_pulled(context.call):
            return decision
        paused = handoffs.pull_pauses.paused(query.now)
        return cheaper_pull(pricer, decision, pools, query, transfers, paused)

    def _pick_alone(self, query: RoutingQuery) -> Pick | None:
        # Pick one endpoint for the whole request, or return None.
        #
        # A pair takes capacity at two endpoints for one admission permit, so all endpoints may be
        # at their limits. A prompt that only an estimate calls too long goes to the longest
        # context.
        context, policy = self._context, self._route.policy
        alone = context.split.pools.alone
        pick = routing_algorithm.pick(policy, query, alone) or routing_algorithm.pick(
            context.split.splitter.crowded, query, alone
        )
        return pick or pick_longest(policy, query, alone, context.call)

    async def attempt(self, choice: EndpointPair | Pick) -> UpstreamError | None:
        record, exchange = self._note_decision(), self.exchange
        if isinstance(choice, EndpointPair):
            exchange.pick, exchange.picked_at = choice.decode, monotonic()
            name = choice.prefill.candidate.endpoint.name
            if choice.is_pull:
                record.pulled_from, record.pulled_tokens = name, choice.pulled_tokens
            else:
                record.prefill = name
            record.dialect = self._context.split.dialect.name
            with PairAttempt(self._context, choice, record) as pair:
                problem = await pair.run(self._query)
            self._recompute = pair.recompute
            if problem is not None:
                exchange.retries += await self._suspects(choice, pair.suspects, problem)
            return problem
        self._whole.query = self._query
        problem = await self._whole.attempt(choice)
        # The prompt was recomputed; a pair of other endpoints may still succeed.
        self._recompute = False
        if problem is not None:
            exchange.retries.append(choice.candidate.endpoint.name)
        return problem

    async def _suspects(
        self, pair: EndpointPair, suspects: list[str], problem: UpstreamError
    ) -> list[str]:
        # Return the names of the endpoints that the next attempt should not use.
        #
        # Both endpoints of a pull can serve the request alone. If the one that answers could not
        # load the KV, it is well and the source may be the cause; if it is dead, the source is
        # needed.
        if not pair.is_pull or problem.kind not in KV_FAILURES:
            return suspects
        answers = pair.decode.candidate
        if await self.gateway.endpoints.check_health(answers):
            return suspects
        return [answers.endpoint.name]

    def _note_decision(self) -> SplitRecord:
        # Count the decision whether to split, and return a new record of it.
        context, decision = self._context, self._decision
        handoffs = context.gateway.handoffs
        handoffs.splitting[self._route.name] = decision.splitting
        handoffs.count_decision(decision)
        record = context.exchange.split = SplitRecord(decision.reason)
        return record

    async def may_retry(self, problem: UpstreamError) -> bool:
        exchange = self.exchange
        if exchange.is_committed:
            return False
        await permit_retry(self.gateway, exchange, problem)
        return True

    def give_up(self, problem: UpstreamError | None) -> None:
        context = self._context
        self._note_decision()
        context.exchange.pick = None
        if not context.split.pools.alone:
            error = unsplittable_error(self._route.name, self._decision.reason)
            if error is not None:
                raise error
        raise no_endpoint_error(context.exchange, self._route, self._query, problem)
