"""Going on elsewhere: a stream that its engine broke off is continued by another, as if nothing had happened.

single()  one leg, in place of legs.single(): the engine is asked to tell the ids of its tokens
go_on()   what follows when a leg breaks after its first byte: the rest, from somebody else, or an error event
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from gateway import legs
from gateway.attempts import break_off, check_chosen
from gateway.booking import Booking
from gateway.client import Client
from gateway.exchange import Exchange
from gateway.framing import LAST_CHUNK, chunk
from gateway.openai import Api, Call
from gateway.relay import STOPPED, UpstreamBroke
from gateway.resume.ledger import Continuation, Ledger, Recorded, Recorder
from gateway.resume.terms import telling, terms_of
from policies import run
from policies.model import Candidate, EngineKind, Pick

if TYPE_CHECKING:
    from gateway.serve import Gateway
    from gateway.snapshot import Route

RESUMED, CLOSED, BROKE = "resumed", "closed", "broke"


async def single(route: Route, x: Exchange, call: Call, client: Client, booking: Booking) -> None:
    """Serve the exchange from the booked endpoint, and keep a ledger of what its client is shown. Raises UpstreamBroke.

    What cannot be continued exactly is served as everywhere else.
    """
    resume, terms = route.resume, terms_of(call) if booking.endpoint.engine is EngineKind.VLLM else None
    if resume is None or terms is None:
        x.ledger = None
        await legs.single(route, x, call, client, booking)
        return
    served = route.engine_name or booking.endpoint.served_model or route.name
    sent = telling(call, served, booking.endpoint.salt_member)
    ledger = x.ledger = Ledger(terms, resume.tokens)
    recorder = Recorder(ledger, ledger.first, served, call.asked_model)
    headers = legs.answer_headers(x, client, booking.endpoint.name)
    # Before its first token it may still be asked anew, whole: a role that was shown would stand in the way.
    relay = Recorded(headers, x.first_token, client.http_1_0, recorder, patient=True, gaps=x.gaps)
    head = booking.upstream.head(x.api) + legs.request_headers(x, client.headers, len(sent.body), booking.endpoint.name)
    x.booking, x.relay, x.sent = booking, relay, sent
    x.sent_at = monotonic()
    await booking.upstream.send(head, sent, relay, client)
    if relay.refused:
        legs.pass_on(x, client, relay, booking.endpoint.name)
    else:
        x.status = 200
        booking.served(relay.usage)


async def go_on(gateway: Gateway, x: Exchange, client: Client, route: Route, call: Call, broke: UpstreamBroke) -> None:
    """An answer broke after its first byte. The rest comes from another endpoint, and from yet another if need be,
    within the fleet's budget for retries; where that cannot be, the client is told in-stream."""
    if x.ledger is None:
        break_off(x, client, broke)
        return
    rest = _Rest(gateway, x, client, route, call, x.ledger)
    problem = broke
    while True:
        result, following = await rest.attempt(problem)
        gateway.accounts.resumed(problem.kind, result)
        if following is None:
            break
        problem = following
    if result in (RESUMED, CLOSED):
        x.status = 200
    else:
        break_off(x, client, UpstreamBroke(STOPPED, "the gateway stops") if result == STOPPED else problem)


class _Body:
    """The body that asks for the rest of an answer; its bytes go once the engine has begun."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


class _Rest:
    """The rest of one answer, tried at one endpoint after the other. It writes where the first relay stopped."""

    __slots__ = ("_call", "_client", "_gateway", "_ledger", "_relay", "_route", "_x")

    def __init__(self, gateway: Gateway, x: Exchange, client: Client, route: Route, call: Call, ledger: Ledger) -> None:
        assert isinstance(x.relay, Recorded)
        self._gateway, self._x, self._client, self._route, self._call = gateway, x, client, route, call
        self._ledger = ledger
        self._relay = x.relay

    async def attempt(self, problem: UpstreamBroke) -> tuple[str, UpstreamBroke | None]:
        """What came of it in a word, and what broke if another attempt is due."""
        x, endpoints, obstacle = self._x, self._gateway.endpoints, self._ledger.standing
        if problem.kind == STOPPED:
            return STOPPED, None
        assert x.pick is not None
        x.retries.append(x.pick.candidate.endpoint.name)
        x.unsent += not problem.sent
        if not obstacle and self._ledger.whole:
            self._close()
            return CLOSED, None
        obstacle = obstacle or await self._leave()
        pick = None if obstacle else self._pick(await check_chosen(self._gateway, x, self._choose))
        if pick is None:
            return obstacle or "nobody", None
        x.pick = pick
        with endpoints.book(pick, self._call.request, x.fingerprint) as booking:
            try:
                return await self._leg(booking), None
            except UpstreamBroke as broke:
                booking.failed(broke)
                return BROKE, broke.with_traceback(None)  # that leads back to who keeps it: a cycle

    async def _leave(self) -> str:
        """Why there is no leave for another attempt; "" where there is. A turn of the budget is for a prefill."""
        x, resume, gate = self._x, self._route.resume, self._gateway.gate
        if resume is None or x.attempts >= resume.attempts:
            return "attempts"
        x.retrying = x.retrying or await gate.retry_turn()
        if gate.stopping:
            return STOPPED
        return "" if x.retrying else "budget"

    def _choose(self, left_out: Sequence[str]) -> Sequence[Candidate]:
        pick = self._pick(left_out)
        return () if pick is None else (pick.candidate,)

    def _pick(self, left_out: Sequence[str]) -> Pick | None:
        x, route = self._x, self._route
        ask = self._gateway.endpoints.ask(self._call.request, x.fingerprint, left_out)
        able = [each for each in route.candidates if each.endpoint.engine is EngineKind.VLLM]
        return run.pick(route.policy, ask, able)

    async def _leg(self, booking: Booking) -> str:
        """What came of it, unless it broke: an engine may have a word against the request itself."""
        x, ledger, asked = self._x, self._ledger, self._call.asked_model
        ledger.resume()
        served = self._route.engine_name or booking.endpoint.served_model or self._route.name
        member, salt = booking.endpoint.salt_member, self._call.salt.decode()
        more = {member: salt} if member and salt else {}
        sent = _Body(ledger.terms.rest(served, ledger.prompt, ledger.said, more))

        def began() -> None:
            booking.first_token()
            sent.body = b""
            ledger.resumed += 1
            x.end_retry(self._gateway.gate)

        recorder = Recorder(ledger, ledger.rest, served, asked)
        relay = Continuation(b"", began, self._client.http_1_0, recorder)
        own = legs.request_headers(x, self._client.headers, len(sent.body), booking.endpoint.name)
        head = booking.upstream.head(Api.COMPLETIONS) + own
        try:
            await booking.upstream.send(head, sent, relay, self._client)
        finally:
            self._relay.continued(relay, ledger.usage)
        if relay.refused:
            return f"status_{legs.refusal(relay)}"
        booking.served(relay.usage)
        return RESUMED

    def _close(self) -> None:
        """Nothing is missing but the end."""
        closing = self._ledger.closing()
        self._client.write(closing if self._client.http_1_0 else chunk(closing) + LAST_CHUNK)
