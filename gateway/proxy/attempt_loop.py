"""The attempt loop: pick an endpoint, reserve capacity and send, until an endpoint answers.

All requests to endpoints use this one loop. A plan decides what is sent:

- a whole request (whole_request.py)
- a request that is split into prefill and decode (split_request.py)
- the rest of a broken stream (resume.py)

The rules for retries are here too: the retry budget limits their number, and an endpoint must pass
a health check before it gets a retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from gateway.http.client_interface import Client
from gateway.protocol.errors import Failure, GatewayError, shutting_down
from gateway.protocol.response.relay import UpstreamError
from gateway.protocol.upstream_error import MODEL_GONE, SHUTDOWN
from gateway.proxy.context_length import is_too_long, too_long_error
from gateway.request_record import Exchange
from gateway.route import Gateway, Route
from policies.filters import serves_tenant
from policies.pricing.split_decision import EndpointPair
from policies.routing_types import Candidate, Pick, RoutingQuery

ChoiceT = TypeVar("ChoiceT", bound=Pick | EndpointPair)


class AttemptPlan(Protocol[ChoiceT]):
    """What differs between kinds of requests: how to choose endpoints, and what to send to them.

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


class HealthScreen:
    """Checks the health of the endpoints that were picked for a retry.

    When an endpoint fails, others may have failed for the same reason, and a request has few
    attempts. Therefore an endpoint must pass a health check before it gets a retry. A failed check
    does not count as an attempt. An endpoint that does not respond is used only if no other is
    left.
    """

    __slots__ = ("_confirmed", "_exchange", "_gateway", "_is_over", "_silent")

    def __init__(self, gateway: Gateway, exchange: Exchange) -> None:
        self._gateway, self._exchange = gateway, exchange
        self._confirmed: list[str] | None = None
        self._silent: list[str] = []
        self._is_over = (
            not exchange.failed_attempts
        )  # refused connections alone are not a reason to check

    async def check(self, choice: Pick | EndpointPair | None) -> Sequence[str] | None:
        """Check the endpoints picked for a retry; return the names to leave out of the next pick.

        None means that this pick may be used, if capacity is reserved before the next await.
        """
        if self._is_over:
            return None
        if self._confirmed is not None:
            if choice is not None:
                return None
            self._silent += self._confirmed  # the endpoint became unavailable during the check
            self._confirmed = None
        elif choice is not None:
            names = [candidate.endpoint.name for candidate in _candidates(choice)]
            if await self._check_health(_candidates(choice)):
                self._confirmed = names
                everyone = [live.endpoint.name for live in self._gateway.endpoints.all()]
                return [name for name in everyone if name not in names]
        elif self._silent:
            self._is_over = True
            return self._exchange.retries
        else:
            return None
        return [*self._exchange.retries, *self._silent]

    async def _check_health(self, candidates: Sequence[Candidate]) -> bool:
        # Check these endpoints, record those that fail, and return whether all passed.
        exchange, endpoints = self._exchange, self._gateway.endpoints
        answers = await asyncio.gather(
            *(endpoints.check_health(candidate) for candidate in candidates)
        )
        for candidate, is_well in zip(candidates, answers, strict=True):
            if is_well is None:
                self._silent.append(candidate.endpoint.name)
            elif not is_well:
                exchange.retries.append(candidate.endpoint.name)
                exchange.unsent_attempts += 1
        return all(answers)


def _candidates(choice: Pick | EndpointPair) -> Sequence[Candidate]:
    if isinstance(choice, EndpointPair):
        return choice.prefill.candidate, choice.decode.candidate
    return (choice.candidate,)


async def permit_retry(gateway: Gateway, exchange: Exchange, problem: UpstreamError) -> None:
    """Wait until the request may be sent again, to another endpoint.

    The gateway limits how many retries may be in progress (the retry budget). The request takes one
    retry from it until its answer begins (gateway/forwarding/hedge.py). A retry is free if no
    engine received the failed attempt.

    The failed endpoints must be in `exchange.retries`. Raises GatewayError with the client's error
    if no retry is permitted.
    """
    if problem.kind == SHUTDOWN:
        raise shutting_down()
    if gateway.count_unsent(exchange, problem):
        return
    if exchange.failed_attempts >= gateway.snapshot.config.retries.attempts:
        raise _given_up(exchange, problem)
    if not exchange.holds_retry_turn:
        exchange.holds_retry_turn = await gateway.gate.retries.acquire()
        gateway.hedger.retrying.append(exchange)
    if gateway.gate.retries.is_stopping:
        raise shutting_down()
    if not exchange.holds_retry_turn:
        raise _given_up(exchange, problem)
    gateway.accounts.count_retry(problem.kind)


def end_retries(gateway: Gateway, exchange: Exchange) -> None:
    """Cancel the request's hedge (a parallel attempt), and return its retry to the budget."""
    if exchange.hedge is not None:
        exchange.hedge.close()
    exchange.give_back_retry_turn(gateway.gate.retries)


def no_endpoint_error(
    exchange: Exchange, route: Route, query: RoutingQuery, problem: UpstreamError | None
) -> GatewayError:
    """Return the client's error when no endpoint can be picked for a request.

    `problem` is the error of the last attempt; None if there was none. If the request was sent to
    no endpoint, the error says why none could be picked.
    """
    if problem is not None and exchange.failed_attempts:
        return _given_up(exchange, problem)
    serving = serves_tenant(query, route.candidates)
    if route.candidates and not serving:
        message = f"No endpoint of model '{route.name}' serves this tenant."
        return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)
    if serving and exchange.call is not None and is_too_long(exchange.call, serving):
        return too_long_error(query.request)
    message = f"No endpoint of model '{route.name}' is available."
    return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)


def _given_up(exchange: Exchange, problem: UpstreamError) -> GatewayError:
    if problem.kind == MODEL_GONE:
        message = (
            f"No engine serves the model '{exchange.model}' any more: "
            f"{exchange.failed_attempts} answered that it does not exist."
        )
        return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
    failure = Failure.UPSTREAM_TIMEOUT if problem.kind == "timeout" else Failure.UPSTREAM_FAILED
    message = f"No engine could respond ({problem.kind}); attempts: {exchange.failed_attempts}."
    return GatewayError(failure, message, retry_after_s=problem.wait_s)


def end_stream_with_error(exchange: Exchange, client: Client, problem: UpstreamError) -> None:
    """End an answer that broke after its first byte.

    The client receives an error event if the response's framing permits one. Otherwise its
    connection is closed.
    """
    assert exchange.relay is not None
    if problem.kind == SHUTDOWN:
        failure, message = Failure.SHUTTING_DOWN, "The gateway stopped during the response. Retry."
    else:
        failure = Failure.UPSTREAM_FAILED
        message = f"The engine failed while answering ({problem.kind})."
    ending = exchange.relay.end_with_error(failure, message)
    # With `ending`, the answer is framed completely: the connection can carry further requests.
    if ending:
        client.write(ending)
    else:
        client.close_after_write()
    exchange.set_interrupted(problem.kind)
