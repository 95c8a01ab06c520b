"""Continues a broken stream at another endpoint, token for token, so that the client sees no break.

prepare_recorded()  builds a request to an engine that reports token ids
continue_stream()   finishes a stream that broke after its first byte, or ends it with an error
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gateway.config import Resume
from gateway.fleet.reservation import Reservation
from gateway.forwarding import engine_refusal, forward
from gateway.forwarding.engine_request_headers import engine_request_head
from gateway.forwarding.response_headers import response_headers
from gateway.http.client_interface import Client
from gateway.protocol.api_table import COMPLETIONS
from gateway.protocol.request.api_call import Call
from gateway.protocol.response.http_response_parser import LAST_CHUNK, encode_chunk
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response.resumable_relay import ContinuationRelay, RecordedRelay
from gateway.protocol.response.resume_eligibility import call_with_token_ids, continuation_terms
from gateway.protocol.response.token_ledger import DIVERGED, Ledger, LedgerRecorder
from gateway.protocol.response.whole_answer_to_stream import write_chunks_with_usage
from gateway.protocol.upstream_error import SHUTDOWN
from gateway.proxy.attempt_loop import attempts
from gateway.proxy.final_errors import end_stream_with_error
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway, Route
from policies import routing_algorithm
from policies.engine_kinds import ENGINE_TRAITS
from policies.routing_types import Pick

RESUMED, CLOSED, BROKE = "resumed", "closed", "broke"


def prepare_recorded(
    resume: Resume,
    exchange: Exchange,
    call: Call,
    client: Client,
    reservation: Reservation,
    on_first: Callable[[], None],
    served: str,
) -> tuple[bytes, Call, Relay]:
    """Build a request like forward.prepare(), but record the tokens of its answer.

    With that record, another endpoint can continue the answer if its stream breaks. If no exact
    continuation is possible, nothing is recorded and `exchange.ledger` is None.

    resume    the settings for continuing broken streams
    on_first  function that is called at the first generated token
    served    the endpoint's name of the model

    Returns the request head, the request and the relay that passes the answer to the client.
    """
    endpoint = reservation.endpoint
    terms = continuation_terms(call) if ENGINE_TRAITS[endpoint.engine].can_continue else None
    if terms is None:
        exchange.ledger = None
        return forward.prepare(exchange, call, client, reservation, on_first, served)
    body = call_with_token_ids(call, served, endpoint.salt_member)
    ledger = exchange.ledger = Ledger(terms, resume.tokens)
    headers = response_headers(exchange, client, endpoint.name)
    relay = forward.new_recorded_relay(exchange, call, client, headers, ledger, served, on_first)
    start, length = reservation.upstream.request_head(call.api.path), len(body.body)
    head = engine_request_head(start, exchange, client.headers, length, endpoint.name)
    return head, body, relay


async def continue_stream(
    gateway: Gateway,
    exchange: Exchange,
    client: Client,
    route: Route,
    call: Call,
    problem: UpstreamError,
) -> None:
    """Finish an answer that broke after its first byte: at other endpoints, or with an error.

    `resume.attempts` and the gateway's retry budget limit the number of attempts.
    """
    if exchange.ledger is None:
        end_stream_with_error(exchange, client, problem)
        return
    rest = RestPlan(gateway, exchange, client, route, call, exchange.ledger)
    if await rest.may_retry(problem):
        await attempts(rest, exchange.retries)
    rest.finish()


class _Body:
    """The body of a request for the rest of a broken answer; freed once an engine responds."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


class RestPlan:
    """The plan for the rest of one broken stream, attempted at one endpoint after another.

    The rest is requested as a completion of a list of token ids: those of the prompt, and those of
    the text that the client has received. Any endpoint that serves whole requests can compute it,
    even if the stream came from a prefill and a decode endpoint.

    result    how the plan ended, a label of penstock_resumes_total; "" until it has ended
    _problem  the error of the previous attempt
    _relay    the relay that began the answer
    """

    __slots__ = (
        *("_call", "_client", "_ledger", "_problem", "_relay", "_route", "exchange", "gateway"),
        "result",
    )

    def __init__(
        self,
        gateway: Gateway,
        exchange: Exchange,
        client: Client,
        route: Route,
        call: Call,
        ledger: Ledger,
    ) -> None:
        assert isinstance(exchange.relay, RecordedRelay)
        self.gateway, self.exchange, self._client = gateway, exchange, client
        self._route, self._call = route, call
        self._ledger = ledger
        self._relay = exchange.relay
        self.result = ""

    # The plan's part of the attempt loop

    def choose(self, left_out: Sequence[str]) -> Pick | None:
        exchange, route, split = self.exchange, self._route, self._route.split
        endpoints = self.gateway.endpoints
        query = endpoints.build_query(self._call.request, exchange.fingerprint, left_out)
        serving = route.candidates if split is None else split.pools.alone
        eligible = [
            candidate
            for candidate in serving
            if ENGINE_TRAITS[candidate.endpoint.engine].can_continue
        ]
        pick = routing_algorithm.pick(route.policy, query, eligible)
        if pick is None and split is not None:
            # Pairs take two places for one permit, so all endpoints may be at their caps.
            pick = routing_algorithm.pick(split.splitter.crowded, query, eligible)
        return pick

    async def attempt(self, pick: Pick) -> UpstreamError | None:
        exchange, request = self.exchange, self._call.request
        exchange.pick = pick
        with self.gateway.endpoints.reserve(pick, request, exchange.fingerprint) as reservation:
            try:
                result = await self._send(reservation)
            except UpstreamError as broke:
                if broke.kind == DIVERGED:  # the engine that continued the answer is not at fault
                    self._end("ambiguous_ids")
                    return None
                reservation.on_failed(broke)
                self._count(BROKE)
                # The error's traceback refers to this frame and its callers, a reference cycle.
                return broke.with_traceback(None)
        self._end(result)
        return None

    async def may_retry(self, problem: UpstreamError) -> bool:
        self._problem = problem
        result = await self._obstacle(problem)
        if result:
            self._end(result)
        return not result

    def give_up(self, problem: UpstreamError | None) -> None:
        self._end("no_endpoint")

    def finish(self) -> None:
        """Record how the continuation ended; if it failed, end the stream with an error."""
        if self.result in (RESUMED, CLOSED):
            self.exchange.status = 200
            return
        problem = self._problem
        if self.result == SHUTDOWN:
            problem = UpstreamError(SHUTDOWN, "the gateway stops")
        end_stream_with_error(self.exchange, self._client, problem)

    # Results

    def _end(self, result: str) -> None:
        self.result = result
        self._count(result)

    def _count(self, result: str) -> None:
        self.gateway.accounts.count_resume(self._problem.kind, result)

    async def _obstacle(self, problem: UpstreamError) -> str:
        # Return the result label with which the plan must end, or "" if it may make an attempt.
        exchange, ledger = self.exchange, self._ledger
        if problem.kind == SHUTDOWN:
            return SHUTDOWN
        assert exchange.pick is not None
        name = exchange.pick.candidate.endpoint.name
        if name not in exchange.retries:  # a pair has recorded its failed endpoints itself
            exchange.retries.append(name)
        exchange.unsent_attempts += not problem.was_sent
        if not ledger.current_obstacle and ledger.is_complete:
            self._close()
            return CLOSED
        return ledger.rest_obstacle or await self._budget_obstacle()

    async def _budget_obstacle(self) -> str:
        # Wait for a turn of the retry budget; return why none is permitted, or "".
        exchange, resume, gate = self.exchange, self._route.resume, self.gateway.gate
        if resume is None or exchange.failed_attempts >= resume.attempts:
            return "attempts"
        exchange.holds_retry_turn = exchange.holds_retry_turn or await gate.retries.acquire()
        if gate.retries.is_stopping:
            return SHUTDOWN
        return "" if exchange.holds_retry_turn else "budget"

    # One attempt to continue the answer

    async def _send(self, reservation: Reservation) -> str:
        # Request the rest of the answer from an engine and relay it; return the result.
        #
        # Raises UpstreamError when the answer breaks again.
        exchange, ledger, requested_model = self.exchange, self._ledger, self._call.requested_model
        ledger.prepare_rest()
        served = self._route.resolve_name(reservation.endpoint)
        member, salt = reservation.endpoint.salt_member, self._call.salt.decode()
        salts = {member: salt} if member and salt else {}
        body = _Body(ledger.terms.rest_body(served, ledger.prompt_ids, ledger.shown_ids, salts))
        # No closure: in a compiled module it would hold this coroutine, and the relay with it.
        on_first_token = partial(self._on_first_token, reservation, body)
        recorder = LedgerRecorder(ledger, ledger.render_rest, served, requested_model)
        relay = ContinuationRelay(
            b"",
            on_first_token,
            self._client.is_http_1_0,
            recorder,
            translator=self._relay.translator,
        )
        relay.event_writer = write_chunks_with_usage
        length, name = len(body.body), reservation.endpoint.name
        start = reservation.upstream.request_head(COMPLETIONS.path)
        head = engine_request_head(start, exchange, self._client.headers, length, name)
        try:
            await reservation.upstream.send(head, body, relay, self._client)
        finally:
            self._relay.add_rest(relay, ledger.usage)
        if relay.is_refused:
            return f"status_{engine_refusal.refusal_status(relay)}"
        reservation.on_served(relay.usage)
        return RESUMED

    def _on_first_token(self, reservation: Reservation, body: _Body) -> None:
        reservation.on_first_token()
        body.body = b""
        self._ledger.resumes += 1
        self.exchange.give_back_retry_turn(self.gateway.gate.retries)

    def _close(self) -> None:
        # Write the closing events of an answer whose text is complete.
        closing = self._ledger.render_end()
        if self._relay.translator is not None:
            closing = self._relay.translator.finish_with(closing)
        self._client.write(
            closing if self._client.is_http_1_0 else encode_chunk(closing) + LAST_CHUNK
        )
