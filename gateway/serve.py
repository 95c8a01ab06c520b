"""THE LINE: one request from its bytes to the last byte of its answer. Read this file first.

    authenticate, wish -> read -> parse -> admit (a Permit to the last byte) -> pick AND book -> leg -> account

Where the room is calm the Permit is had without a thought, and the prompt is fingerprinted for the pick. Where it is
not, the admission judges the request by what of its prompt is cached, so the fingerprint comes first.

Stages are plain calls, in order. No await stands between pick and book: one turn of the event loop is the lock.
A retry is free until the first byte reaches the client; after it an answer can only go on (resume/) or be broken off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic

from gateway import overflow
from gateway.account import Accounts
from gateway.answer import Failure, GatewayError
from gateway.attempts import crowded, nobody, retry
from gateway.client import Client
from gateway.endpoints import EndpointTable
from gateway.exchange import Exchange
from gateway.gate import Gate
from gateway.hedge import OVERTAKEN, Hedger
from gateway.kept import outcome_of
from gateway.openai import Call, Caller, parse
from gateway.relay import UpstreamBroke
from gateway.resume.going_on import go_on
from gateway.snapshot import Route, Snapshot
from gateway.split import dispatch as split
from gateway.split.handoffs import Handoffs
from policies import run
from policies.fingerprint import Fingerprint
from policies.model import Ask, Candidate, Pick, Request

log = logging.getLogger("penstock")


class Gateway:
    """What the line works with. `snapshot` is replaced whole; the rest is live and outlives it."""

    __slots__ = ("accounts", "endpoints", "gate", "handoffs", "hedger", "snapshot")

    def __init__(
        self, snapshot: Snapshot, endpoints: EndpointTable, gate: Gate, accounts: Accounts, handoffs: Handoffs
    ) -> None:
        self.snapshot = snapshot
        self.endpoints = endpoints
        self.gate = gate
        self.accounts = accounts
        self.handoffs = handoffs
        self.hedger = Hedger(snapshot.config.retries.hedge)


async def serve(gateway: Gateway, x: Exchange, client: Client) -> None:
    """Answer one request. Whatever happens, the client gets one answer and the exchange is accounted once."""
    try:
        await _line(gateway, x, client)
    except GatewayError as error:
        x.refused(error)
        client.refuse(error, x.id)
    except asyncio.CancelledError:
        x.gone()
        raise
    except Exception:
        log.exception("request %s failed inside the gateway", x.id)
        x.broken()
        _apologise(x, client)
    finally:
        if x.holder is not None:
            x.let_go()
        try:
            if x.quota is not None or x.room is not None:  # None, nearly always
                _settle(gateway, x)
        finally:
            gateway.accounts.close(x)


def _settle(gateway: Gateway, x: Exchange) -> None:
    """Who wants to know hears how it ended, or that nothing came of it: its tenant's quota and the room it was in."""
    if x.call is None:
        return
    request = x.call.request
    if x.quota is not None:
        output_tokens = None if x.outcome == "refused" else outcome_of(x).output_tokens
        gateway.gate.quotas.settle(x.quota, request, output_tokens)
    if x.room is None:
        return
    if x.asked is not None:
        x.room.ended(request, partial(outcome_of, x))
    else:
        x.room.unbooked(request)


async def _line(gateway: Gateway, x: Exchange, client: Client) -> None:
    snapshot, gate = gateway.snapshot, gateway.gate
    if snapshot.tenants:
        x.tenant = snapshot.authenticate(client.headers)
    wish = snapshot.levels.wish(client.headers, x.tenant)
    body = client.body_at_hand() or await _gather(gateway, x, client)
    x.received_at = received_at = monotonic()
    x.hold(gate, len(body))
    kept = gateway.accounts.kept
    caller = Caller(x.id, x.tenant, wish, received_at, kept.lengths, snapshot.salts, kept.prompts)
    call = x.call = parse(body, x.api, snapshot.routes, caller)
    del body  # from here the call owns the bytes, and lets go of them when no retry can need them
    if gate.quotas.by_tenant:
        x.quota = gate.quotas.take(call.request)
    route = snapshot.routes[call.asked_model]
    if route.trial is not None:
        route = route.trial.side(x, call.request, route)
    x.model = route.name
    x.parsed_at = admitted_at = monotonic()
    if wish.hasty or not route.room.take():
        route = await _enter(gateway, snapshot, x, route, call)
        admitted_at = monotonic()
    with route.room:
        x.admitted_at = admitted_at
        if route.split is None:
            await _dispatch(gateway, x, client, route, call)
        else:
            await split.dispatch(gateway, route.split, x, client, route, call)


async def _gather(gateway: Gateway, x: Exchange, client: Client) -> bytes:
    """The body of a request that did not come in one read. A large one waits until it may be parsed."""
    gate = gateway.gate
    return await client.body(partial(x.hold, gate), partial(gate.large_bodies.turn, x.tenant or x.client))


async def _enter(gateway: Gateway, snapshot: Snapshot, x: Exchange, route: Route, call: Call) -> Route:
    """Be judged, and wait if need be. The route whose room gave a Permit: its own or, before a refusal, a smaller
    model's. Raises GatewayError when it is refused."""
    fingerprint = x.fingerprint = gateway.endpoints.prefixes.of(call, route.name) if route.fingerprints else None
    # No closure: compiled, it and this coroutine's locals would hold each other, and with them an old snapshot.
    ask = partial(_ask, gateway.endpoints, call.request, fingerprint)
    try:
        x.room = await route.room.enter(ask(0.0), None if fingerprint is None else ask)
    except GatewayError:
        tier = overflow.into(gateway.endpoints, snapshot.routes, route, call)
        if tier is None:
            raise
        x.model = x.tier = tier.name
        x.fingerprint = None
        return tier
    return _in_force(gateway, snapshot, x, route, call)


def _ask(endpoints: EndpointTable, request: Request, fingerprint: Fingerprint | None, _: float) -> Ask:
    """The question of a request that may wait: it is asked again, and the index may know more by then."""
    return endpoints.ask(request, fingerprint, ())


def _in_force(gateway: Gateway, snapshot: Snapshot, x: Exchange, route: Route, call: Call) -> Route:
    """The route, or what a reload has made of it while the request waited: its place is one at today's endpoints. A
    name that leads elsewhere now was meant as it was when it was asked."""
    now = gateway.snapshot.routes.get(call.asked_model)
    if gateway.snapshot is snapshot or now is None or (now.name, now.room) != (route.name, route.room):
        return route
    x.side = None
    return now if now.trial is None else now.trial.side(x, call.request, now)


async def _dispatch(gateway: Gateway, x: Exchange, client: Client, route: Route, call: Call) -> None:
    """Pick, book and send, until an endpoint answers or nothing is left to try."""
    endpoints, request, fingerprint = gateway.endpoints, call.request, x.fingerprint
    if fingerprint is None and route.fingerprints:
        fingerprint = x.fingerprint = endpoints.prefixes.of(call, route.name)
    problem: UpstreamBroke | None = None
    left_out: Sequence[str] = ()
    waiting = gateway.hedger.waiting
    try:
        while True:
            ask = endpoints.ask(request, fingerprint, left_out)
            pick = x.pick = run.pick(route.policy, ask, route.candidates) or crowded(route, ask)
            if pick is None:
                raise nobody(x, route, ask, problem)
            x.picked_at = monotonic()
            if route.watched:
                _watch(gateway, x, route, ask, pick)
            with endpoints.book(pick, request, fingerprint) as booking:
                x.booked(route.room, ask, pick)
                waiting[x] = client, route
                try:
                    return await route.leg(route, x, call, client, booking)
                except UpstreamBroke as broke:
                    if broke.kind != OVERTAKEN:
                        booking.failed(broke)
                    problem = broke.with_traceback(None)  # that leads back to `problem`: a cycle
            if x.hedge is not None and not x.hedge.is_over:
                if problem.kind != OVERTAKEN:
                    x.retries.append(pick.candidate.endpoint.name)
                problem = await x.hedge.finish()
                if problem is None:
                    return None
                pick = x.pick or pick
            if x.committed:
                return await go_on(gateway, x, client, route, call, problem)
            x.retries.append(pick.candidate.endpoint.name)
            left_out = await retry(gateway, x, problem, partial(_choose, endpoints, x, route, request))
    finally:
        waiting.pop(x, None)
        if x.retrying:
            _end_retries(gateway, x)


def _choose(
    endpoints: EndpointTable, x: Exchange, route: Route, request: Request, left_out: Sequence[str]
) -> Sequence[Candidate]:
    """As the pick of an attempt, which it precedes."""
    ask = endpoints.ask(request, x.fingerprint, left_out)
    pick = run.pick(route.policy, ask, route.candidates) or crowded(route, ask)
    return () if pick is None else (pick.candidate,)


def _end_retries(gateway: Gateway, x: Exchange) -> None:
    if x.hedge is not None:
        x.hedge.close()
    x.end_retry(gateway.gate)


def _watch(gateway: Gateway, x: Exchange, route: Route, ask: Ask, pick: Pick) -> None:
    """A pick, before its place is taken: accounts and shadows note what the booking is about to change."""
    gateway.accounts.picked(x, route.policy, ask, pick)
    if route.shadows is not None:
        route.shadows.picked(x, route, ask, pick)


def _apologise(x: Exchange, client: Client) -> None:
    if x.committed:
        client.hang_up()
    else:
        client.refuse(GatewayError(Failure.INTERNAL, "The gateway failed on this request."), x.id)
