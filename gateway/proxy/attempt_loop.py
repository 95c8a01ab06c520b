"""The attempt loop: pick an endpoint, reserve capacity and send, until an endpoint answers.

All requests to endpoints use this one loop. A plan decides what is sent:

- a whole request (whole_request.py)
- a request that is split into prefill and decode (split_request.py)
- the rest of a broken stream (resume.py)

retry_permission.py has the rules for retries, final_errors.py the errors after the last attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from gateway.protocol.response.relay import UpstreamError
from gateway.proxy.retry_permission import HealthScreen
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway
from policies.pricing.split_decision import EndpointPair
from policies.routing_types import Pick

ChoiceT = TypeVar("ChoiceT", bound=Pick | EndpointPair)


class AttemptPlan(Protocol[ChoiceT]):
    """The interface of a kind of request: how its endpoints are chosen, and what is sent to them.

    A plan serves one request, or the rest of one broken stream.
    """

    @property
    def gateway(self) -> Gateway: ...
    @property
    def exchange(self) -> Exchange: ...

    def choose(self, left_out: Sequence[str]) -> ChoiceT | None:
        """Pick one endpoint, or two for a split request; return None if there is none.

        `left_out` has the names of endpoints not to pick. A pick has no side effects, so it may be
        repeated before an attempt.
        """
        ...

    async def attempt(self, choice: ChoiceT) -> UpstreamError | None:
        """Reserve capacity at the chosen endpoints, send the request and relay the answer.

        Returns the error that broke the answer, or None after success. The capacity is reserved
        before the first await, and released at the end.
        """
        ...

    async def may_retry(self, problem: UpstreamError) -> bool:
        """Record a failed attempt, and return whether the request may be attempted again.

        It may not if the client has received part of the answer. Raises GatewayError if the client
        is to receive an error instead.
        """
        ...

    def give_up(self, problem: UpstreamError | None) -> None:
        """End the request because no endpoint can be picked.

        `problem` is the error of the last attempt; None if there was none. Raises GatewayError if
        the client is to receive an error.
        """
        ...


async def attempts(
    plan: AttemptPlan[ChoiceT], left_out: Sequence[str] = ()
) -> UpstreamError | None:
    """Attempt a request by its plan until an endpoint answers or no retry is possible.

    Returns None after success, else the error of the last attempt. `left_out` has the names of
    endpoints that have failed this request before.
    """
    problem: UpstreamError | None = None
    screen: HealthScreen | None = None
    while True:
        choice = plan.choose(left_out)
        if left_out:  # a retry
            screen = screen or HealthScreen(plan.gateway, plan.exchange)
            names = await screen.check(choice)
            if names is not None:
                left_out = names
                continue
        if choice is None:
            plan.give_up(problem)
            return problem
        # No await between the pick and the reservation: one turn of the event loop is the lock.
        problem = await plan.attempt(choice)
        if problem is None:
            return None
        exchange = plan.exchange
        if exchange.hedge is not None:
            problem = await exchange.hedge.finish(problem)
            if problem is None:
                return None
        if not await plan.may_retry(problem):
            return problem
        left_out, screen = exchange.retries, None
