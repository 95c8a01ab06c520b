"""The attempt loop: pick, book and send, until an endpoint answers or no attempt is left.

There is one loop for everything that is sent to endpoints. What differs is a plan: a whole request
(gateway/proxy/whole.py), a request split into prefill and decode (gateway/proxy/pair.py), or the
rest of a broken stream (gateway/proxy/rest.py). This module also holds the rules for a retry: the
budget, and the health check of the endpoint that comes next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from gateway.exchange import Exchange
from gateway.http.client import Client
from gateway.protocol.errors import Failure, GatewayError, shutting_down
from gateway.protocol.media import BYTES_PER_TOKEN, MOST_BYTES_PER_TOKEN
from gateway.protocol.openai import Call
from gateway.protocol.relay import SHUTDOWN, UpstreamError
from gateway.protocol.upstream_error import MODEL_GONE
from gateway.route import Gateway, Route
from policies.filters import serves_tenant
from policies.model import Candidate, Pick, Request, RoutingQuery
from policies.pricing.split import EndpointPair

ChoiceT = TypeVar("ChoiceT", bound=Pick | EndpointPair)

_OUTPUT_LIMITS = frozenset(("max_tokens", "max_completion_tokens"))


class AttemptPlan(Protocol[ChoiceT]):
    """What the loop attempts, and how: one plan per request, or per rest of a broken stream."""

    @property
    def gateway(self) -> Gateway: ...
    @property
    def exchange(self) -> Exchange: ...

    def choose(self, left_out: Sequence[str]) -> ChoiceT | None:
        """Pick one endpoint or a pair, none of which is in `left_out`; None when there is none.

        Has no effect: it may be called more than once before an attempt.
        """
        ...

    async def attempt(self, choice: ChoiceT) -> UpstreamError | None:
        """Book a choice, send the request and relay the answer; return what broke, or None.

        The places are booked before the first await, and given back at the end.
        """
        ...

    async def may_retry(self, problem: UpstreamError) -> bool:
        """Record a failed attempt and ask for permission to make another one.

        False: the answer has begun, so that no retry of it is possible. Raises GatewayError when
        the request is to be refused instead.
        """
        ...

    def give_up(self, problem: UpstreamError | None) -> None:
        """End the plan because no endpoint can be picked; `problem` is how the last attempt broke.

        Raises GatewayError when the request is to be refused.
        """
        ...


async def attempts(
    plan: AttemptPlan[ChoiceT], left_out: Sequence[str] = ()
) -> UpstreamError | None:
    """Attempt a plan until it is answered or ends; return what broke an answer that had begun.

    `left_out`: names of endpoints that have failed this request before.
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
        # No await between the pick and the booking: one turn of the event loop is the lock.
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
    """The health checks before one retry.

    An attempt was lost at one endpoint, so others may be dead of the same cause, and a request has
    few attempts. Therefore the endpoint that was chosen for a retry has to answer its health check
    first. A failed check is not an attempt. An endpoint that does not answer the check is left out
    as long as there are others.

    _confirmed  names of the choice that passed; None while there is none
    _silent     names of the endpoints that did not answer
    _is_over    the next choice stands without a check, because only silent endpoints are left
    """

    __slots__ = ("_confirmed", "_exchange", "_gateway", "_is_over", "_silent")

    def __init__(self, gateway: Gateway, exchange: Exchange) -> None:
        self._gateway, self._exchange = gateway, exchange
        self._confirmed: list[str] | None = None
        self._silent: list[str] = []
        self._is_over = (
            not exchange.failed_attempts
        )  # refused connections alone are no reason to check

    async def check(self, choice: Pick | EndpointPair | None) -> Sequence[str] | None:
        """Return the names that another choice has to leave out.

        None: this choice stands, and has to be booked in this turn of the event loop.
        """
        if self._is_over:
            return None
        if self._confirmed is not None:
            if choice is not None:
                return None
            self._silent += self._confirmed  # it became unavailable during the check
            self._confirmed = None
        elif choice is not None:
            names = [candidate.endpoint.name for candidate in _candidates(choice)]
            if await self._ask(_candidates(choice)):
                self._confirmed = names
                everyone = [live.endpoint.name for live in self._gateway.endpoints.all()]
                return [name for name in everyone if name not in names]
        elif self._silent:
            self._is_over = True
            return self._exchange.retries
        else:
            return None
        return [*self._exchange.retries, *self._silent]

    async def _ask(self, candidates: Sequence[Candidate]) -> bool:
        """Check the endpoints, noting silent and failed ones; return whether all are well."""
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
    """Wait for permission to attempt the request again on another endpoint.

    Raises GatewayError with the client's refusal when there is none. The endpoints that failed are
    in `exchange.retries` already. An endpoint that never received the request cost no engine
    anything, so a retry after it needs no permission; each endpoint is tried once, so these retries
    end too. A turn of the retry budget is held until the answer begins (gateway/legs/hedge.py).
    """
    if problem.kind == SHUTDOWN:
        raise shutting_down()
    if gateway.count_unsent(exchange, problem):
        return
    if exchange.failed_attempts >= gateway.snapshot.config.retries.attempts:
        raise _given_up(exchange, problem)
    if not exchange.holds_retry_turn:
        exchange.holds_retry_turn = await gateway.gate.acquire_retry()
        gateway.hedger.retrying.append(exchange)
    if gateway.gate.is_stopping:
        raise shutting_down()
    if not exchange.holds_retry_turn:
        raise _given_up(exchange, problem)
    gateway.accounts.count_retry(problem.kind)


def end_retries(gateway: Gateway, exchange: Exchange) -> None:
    """End a second attempt that is still under way, and give back the turn of the retry budget."""
    if exchange.hedge is not None:
        exchange.hedge.close()
    exchange.give_back_retry_turn(gateway.gate)


def no_endpoint_error(
    exchange: Exchange, route: Route, ask: RoutingQuery, problem: UpstreamError | None
) -> GatewayError:
    """Return the refusal for a request when no endpoint can be picked.

    `problem` is how the last attempt broke; None if there was none. A request that was sent to no
    endpoint is refused for lack of endpoints, not for their failures.
    """
    if problem is not None and exchange.failed_attempts:
        return _given_up(exchange, problem)
    serving = serves_tenant(ask, route.candidates)
    if route.candidates and not serving:
        message = f"No endpoint of model '{route.name}' serves this tenant."
        return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)
    if serving and exchange.call is not None and is_too_long(exchange.call, serving):
        return _too_long(ask.request)
    message = f"No endpoint of model '{route.name}' is available."
    return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)


def _given_up(exchange: Exchange, problem: UpstreamError) -> GatewayError:
    if problem.kind == MODEL_GONE:
        message = (
            f"No engine serves the model '{exchange.model}' any more: "
            f"{len(exchange.retries)} answered that it does not exist."
        )
        return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
    failure = Failure.UPSTREAM_TIMEOUT if problem.kind == "timeout" else Failure.UPSTREAM_FAILED
    message = f"No engine could answer ({problem.kind}); {len(exchange.retries)} tried."
    return GatewayError(failure, message)


def is_too_long(call: Call, candidates: Sequence[Candidate]) -> bool:
    """Return whether a prompt and its answer exceed every endpoint's context, by least_tokens()."""
    needed_tokens = least_tokens(call)
    limits = [candidate.endpoint.context_tokens for candidate in candidates]
    return all(limit is not None and limit < needed_tokens for limit in limits)


def least_tokens(call: Call) -> int:
    """Return the least number of tokens that one prompt of the call and its answer may have.

    An engine may count hardly any tokens for images and files.
    """
    request, prompt_tokens = call.request, call.request.prompt_tokens
    if call.estimated_tokens:
        text_tokens = max(0, call.estimated_tokens - call.media_size.tokens)
        text_bytes = text_tokens * BYTES_PER_TOKEN
        prompt_tokens = min(prompt_tokens, text_bytes // MOST_BYTES_PER_TOKEN)
    is_limited = not _OUTPUT_LIMITS.isdisjoint(call.members)
    output_tokens = request.output_tokens // request.choices if is_limited else 1
    return prompt_tokens // request.prompts + output_tokens


def _too_long(request: Request) -> GatewayError:
    tokens = request.prompt_tokens + request.output_tokens
    return GatewayError(
        Failure.CONTEXT_TOO_LONG,
        f"No endpoint takes a context of about {tokens} tokens "
        f"({request.prompt_tokens} in the prompt, {request.output_tokens} to be generated).",
    )


def end_stream_with_error(exchange: Exchange, client: Client, problem: UpstreamError) -> None:
    """End an answer that broke after its first byte.

    It ends with an error event where the framing allows one, otherwise by closing the connection.
    """
    assert exchange.relay is not None
    if problem.kind == SHUTDOWN:
        failure, message = Failure.SHUTTING_DOWN, "The gateway stopped while answering. Ask again."
    else:
        failure = Failure.UPSTREAM_FAILED
        message = f"The engine failed while answering ({problem.kind})."
    ending = exchange.relay.end_with_error(failure, message)
    if (
        ending
    ):  # it ends the answer's framing, so the client's connection can carry further requests
        client.write(ending)
    else:
        client.close_after_write()
    exchange.set_interrupted(problem.kind)
