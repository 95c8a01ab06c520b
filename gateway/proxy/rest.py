"""Continue a broken stream on another endpoint, token for token, without the client noticing.

prepare_recorded()  an attempt whose engine reports token ids, in place of legs.prepare()
continue_stream()   what follows when a stream breaks after its first byte: its rest, or an error
                    event
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.config import Resume
from gateway.exchange import Exchange
from gateway.fleet.booking import Booking
from gateway.http.client import Client
from gateway.legs import forward
from gateway.protocol.openai import Api, Call
from gateway.protocol.relay import STOPPED, Relay, UpstreamBroke
from gateway.protocol.response_framing import LAST_CHUNK, chunk
from gateway.protocol.resume_terms import telling, terms_of
from gateway.protocol.token_ledger import Continuation, Ledger, Recorded, Recorder
from gateway.proxy.attempts import attempts, break_off
from gateway.route import Gateway, Route
from policies import run
from policies.model import EngineKind, Pick

RESUMED, CLOSED, BROKE = "resumed", "closed", "broke"


def prepare_recorded(
    resume: Resume,
    exchange: Exchange,
    call: Call,
    client: Client,
    booking: Booking,
    on_first: Callable[[], None],
    served: str,
) -> tuple[bytes, Call, Relay]:
    """Build an attempt as legs.prepare() does, and record the tokens that the client receives.

    `exchange.ledger` is None afterwards if the answer could not be continued exactly. Such a
    request is sent as usual.
    """
    endpoint = booking.endpoint
    terms = terms_of(call) if endpoint.engine is EngineKind.VLLM else None
    if terms is None:
        exchange.ledger = None
        return forward.prepare(exchange, call, client, booking, on_first, served)
    body = telling(call, served, endpoint.salt_member)
    ledger = exchange.ledger = Ledger(terms, resume.tokens)
    recorder = Recorder(ledger, ledger.first, served, call.asked_model)
    headers = forward.answer_headers(exchange, client, endpoint.name)
    # Patient: until its first token the request may be retried whole, which a role already shown
    # would prevent.
    relay = Recorded(headers, on_first, client.http_1_0, recorder, patient=True, gaps=exchange.gaps)
    head = booking.upstream.head(exchange.api)
    head += forward.request_headers(exchange, client.headers, len(body.body), endpoint.name)
    return head, body, relay


async def continue_stream(
    gateway: Gateway,
    exchange: Exchange,
    client: Client,
    route: Route,
    call: Call,
    problem: UpstreamBroke,
) -> None:
    """Finish an answer that broke after its first byte: from other endpoints, or with an error.

    Attempts are limited by `resume.attempts` and take turns of the fleet's retry budget.
    """
    if exchange.ledger is None:
        break_off(exchange, client, problem)
        return
    rest = RestPlan(gateway, exchange, client, route, call, exchange.ledger)
    if await rest.may_retry(problem):
        await attempts(rest, exchange.retries)
    rest.finish()


class _Body:
    """The request for the rest of an answer; its bytes are released once the engine has begun."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


class RestPlan:
    """The rest of one broken stream, attempted at one endpoint after another.

    The rest is a completion whose prompt is the ids of the original prompt and of the tokens that
    the client has. Any endpoint that serves whole requests can compute it, also where the stream
    came from a prefill and decode pair.

    result    how it ended, a label of penstock_resumes_total; "" while an attempt is due
    _problem  how the newest attempt but this one broke
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
        assert isinstance(exchange.relay, Recorded)
        self.gateway, self.exchange, self._client = gateway, exchange, client
        self._route, self._call = route, call
        self._ledger = ledger
        self._relay = exchange.relay
        self.result = ""

    # The plan's part of the attempt loop

    def choose(self, left_out: Sequence[str]) -> Pick | None:
        exchange, route, split = self.exchange, self._route, self._route.split
        endpoints = self.gateway.endpoints
        ask = endpoints.ask(self._call.request, exchange.fingerprint, left_out)
        serving = route.candidates if split is None else split.pools.alone
        able = [candidate for candidate in serving if candidate.endpoint.engine is EngineKind.VLLM]
        pick = run.pick(route.policy, ask, able)
        if pick is None and split is not None:
            # Pairs take two places for one permit, so all endpoints may be at their caps.
            pick = run.pick(split.splitter.crowded, ask, able)
        return pick

    async def attempt(self, pick: Pick) -> UpstreamBroke | None:
        exchange, request = self.exchange, self._call.request
        exchange.pick = pick
        with self.gateway.endpoints.book(pick, request, exchange.fingerprint) as booking:
            try:
                result = await self._send(booking)
            except UpstreamBroke as broke:
                booking.failed(broke)
                self._count(BROKE)
                # Its traceback leads to this frame and its callers: a reference cycle.
                return broke.with_traceback(None)
        self._end(result)
        return None

    async def may_retry(self, problem: UpstreamBroke) -> bool:
        self._problem = problem
        result = await self._obstacle(problem)
        if result:
            self._end(result)
        return not result

    def give_up(self, problem: UpstreamBroke | None) -> None:
        self._end("nobody")

    def finish(self) -> None:
        """End the exchange as the attempts came out."""
        if self.result in (RESUMED, CLOSED):
            self.exchange.status = 200
            return
        problem = self._problem
        if self.result == STOPPED:
            problem = UpstreamBroke(STOPPED, "the gateway stops")
        break_off(self.exchange, self._client, problem)

    # Results

    def _end(self, result: str) -> None:
        self.result = result
        self._count(result)

    def _count(self, result: str) -> None:
        self.gateway.accounts.resumed(self._problem.kind, result)

    async def _obstacle(self, problem: UpstreamBroke) -> str:
        """Return the result that ends the plan; "" if another attempt is permitted."""
        exchange, ledger = self.exchange, self._ledger
        if problem.kind == STOPPED:
            return STOPPED
        assert exchange.pick is not None
        name = exchange.pick.candidate.endpoint.name
        if name not in exchange.retries:  # a pair has recorded its failed endpoints itself
            exchange.retries.append(name)
        exchange.unsent += not problem.sent
        obstacle = ledger.standing
        if not obstacle and ledger.whole:
            self._close()
            return CLOSED
        return obstacle or await self._budget_obstacle()

    async def _budget_obstacle(self) -> str:
        """Wait for a turn of the retry budget; return why none is permitted, "" otherwise."""
        exchange, resume, gate = self.exchange, self._route.resume, self.gateway.gate
        if resume is None or exchange.attempts >= resume.attempts:
            return "attempts"
        exchange.retrying = exchange.retrying or await gate.retry_turn()
        if gate.stopping:
            return STOPPED
        return "" if exchange.retrying else "budget"

    # One attempt

    async def _send(self, booking: Booking) -> str:
        """Send the request for the rest and relay it; return the result.

        Raises UpstreamBroke when it breaks again.
        """
        exchange, ledger, asked = self.exchange, self._ledger, self._call.asked_model
        ledger.resume()
        served = self._route.resolve_name(booking.endpoint)
        member, salt = booking.endpoint.salt_member, self._call.salt.decode()
        salts = {member: salt} if member and salt else {}
        body = _Body(ledger.terms.rest(served, ledger.prompt, ledger.said, salts))

        def on_first_token() -> None:
            booking.first_token()
            body.body = b""
            ledger.resumed += 1
            exchange.end_retry(self.gateway.gate)

        recorder = Recorder(ledger, ledger.rest, served, asked)
        relay = Continuation(b"", on_first_token, self._client.http_1_0, recorder)
        length, name = len(body.body), booking.endpoint.name
        head = booking.upstream.head(Api.COMPLETIONS)
        head += forward.request_headers(exchange, self._client.headers, length, name)
        try:
            await booking.upstream.send(head, body, relay, self._client)
        finally:
            self._relay.continued(relay, ledger.usage)
        if relay.refused:
            return f"status_{forward.refusal(relay)}"
        booking.served(relay.usage)
        return RESUMED

    def _close(self) -> None:
        """Write the end of an answer that lacks nothing else."""
        closing = self._ledger.closing()
        self._client.write(closing if self._client.http_1_0 else chunk(closing) + LAST_CHUNK)
