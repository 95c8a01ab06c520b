"""Decides whether and where a request may be sent again after a failed attempt.

The retry budget limits the number of retries, and an endpoint must pass a health check before it
gets a retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.protocol.errors import shutting_down
from gateway.protocol.upstream_error import SHUTDOWN, UpstreamError
from gateway.proxy.final_errors import last_attempt_error
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway
from policies.pricing.split_decision import EndpointPair
from policies.routing_types import Candidate, Pick


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
        # Refused connections alone are not a reason to check.
        self._is_over = not exchange.failed_attempts

    async def check(self, choice: Pick | EndpointPair | None) -> Sequence[str] | None:
        """Check the health of the endpoints that were picked for a retry.

        Returns None if this pick may be used; capacity must then be reserved before the next await.
        Otherwise returns the names of the endpoints to leave out of the next pick.
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
        raise last_attempt_error(exchange, problem)
    if not exchange.holds_retry_turn:
        exchange.holds_retry_turn = await gateway.gate.retries.acquire()
        gateway.hedger.retrying.append(exchange)
    if gateway.gate.retries.is_stopping:
        raise shutting_down()
    if not exchange.holds_retry_turn:
        raise last_attempt_error(exchange, problem)
    gateway.accounts.count_retry(problem.kind)


def end_retries(gateway: Gateway, exchange: Exchange) -> None:
    """Cancel a request's hedge, and return its retry to the retry budget.

    The retry budget limits how many retries run at once. A hedge is a second attempt in parallel.
    """
    if exchange.hedge is not None:
        exchange.hedge.close()
    exchange.give_back_retry_turn(gateway.gate.retries)
