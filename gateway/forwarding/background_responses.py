"""Counts responses that engines generate in the background as running requests of their tenant.

An engine answers a request for a background response before it generates the response. The gateway
polls the engine until the response has ended. Until then, the response counts against the tenant's
`limits.concurrent_requests`.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import NamedTuple

import msgspec

from gateway.admission.quota_charges import BackgroundResponse, QuotaCharge, Quotas
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.protocol.api_table import RESPONSES
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.request_record import Exchange
from policies.routing_types import Request

FIRST_WAIT_S, MAX_WAIT_S = 0.25, 5.0
"""Time until an engine is asked first, and the maximum time between two questions."""
WAIT_SHARE = 0.25
"""Time between two questions as a share of the response's age."""
LOST_S = 60.0
"""A response whose engine gives no answer for this time is taken for lost."""
MAX_AGE_S = 3600.0
"""A response that still runs after this time does not count any more."""
_RUNNING = ("queued", "in_progress")


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class _Response(msgspec.Struct):
    status: str
    usage: _Usage | None = None


class _NoBody(NamedTuple):
    body: bytes = b""


_ENDED = _Response("lost")
_decode = msgspec.json.Decoder(_Response).decode


class BackgroundResponses:
    """Polls engines about background responses, to know which ones still run for each tenant."""

    def __init__(self, endpoints: EndpointTable, quotas: Quotas) -> None:
        """Create an empty collection of background responses.

        endpoints  all endpoints; their engines are asked about the responses
        quotas     the tenants' quotas, whose charges are corrected when responses have ended
        """
        self._endpoints = endpoints
        self._quotas = quotas
        self._asked: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, exchange: Exchange) -> bool:
        """Start to poll the engine about an ended request's background response, if it still runs.

        Returns whether it does. If True, the caller must not settle the request's quota charge:
        it is settled when the response has ended.
        """
        charge, call = exchange.quota, exchange.call
        if charge is None or charge.background is None or call is None:
            return False
        is_over = exchange.outcome == "served" and call.request.stream
        if is_over or exchange.outcome not in ("served", "client_gone", "interrupted"):
            return False
        task = asyncio.get_running_loop().create_task(
            self._follow(charge, charge.background, call.request), name="background response"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def on_ended(self, response_id: str) -> None:
        """Ask the engine soon whether a response has ended: its client has cancelled or read it."""
        asked = self._asked.get(response_id)
        if asked is not None:
            asked.set()

    def close(self) -> None:
        """Stop following the background responses of all engines, because the gateway stops."""
        for task in self._tasks:
            task.cancel()

    async def _follow(
        self, charge: QuotaCharge, response: BackgroundResponse, request: Request
    ) -> None:
        asked = self._asked[response.response_id] = asyncio.Event()
        # A response without counts costs what was expected of it.
        usage = _Usage(request.prompt_tokens, request.output_tokens)
        try:
            usage = (await self._wait_for_end(response, asked)).usage or usage
        finally:
            del self._asked[response.response_id]
            self._quotas.settle(charge, request, usage.output_tokens, usage.input_tokens)

    async def _wait_for_end(self, response: BackgroundResponse, asked: asyncio.Event) -> _Response:
        began = seen_at = now = monotonic()
        while now - began < MAX_AGE_S and now - seen_at < LOST_S:
            wait_s = min(MAX_WAIT_S, max(FIRST_WAIT_S, WAIT_SHARE * (now - began)))
            timer = asyncio.get_running_loop().call_later(wait_s, asked.set)
            try:
                await asked.wait()
            finally:
                timer.cancel()
            asked.clear()
            state, now = await self._ask(response), monotonic()
            if state is not None:
                seen_at = now
                if state.status not in _RUNNING:
                    return state
        return _ENDED

    async def _ask(self, response: BackgroundResponse) -> _Response | None:
        # Return the response as its engine knows it; None if the engine gives no clear answer.
        name = response.endpoint
        live = next((each for each in self._endpoints.all() if each.endpoint.name == name), None)
        if live is None:
            return None
        head = live.upstream.request_head(f"{RESPONSES.path}/{response.response_id}")
        head = b"GET" + head.removeprefix(b"POST") + b"content-length: 0\r\n\r\n"
        relay, answer = Relay(b"", is_http_1_0=True), InternalAnswer()
        try:
            await live.upstream.send(head, _NoBody(), relay, answer)
            if relay.is_refused:
                return _ENDED if relay.status == 404 else None
            return _decode(answer.body)
        except (UpstreamError, msgspec.DecodeError):
            return None
