"""THE LINE: one request from its bytes to the last byte of its answer. Read this file first.

    authenticate -> read -> parse -> admit (a Permit to the last byte) -> fingerprint -> pick AND book -> leg -> account

Stages are plain calls, in order. No await stands between pick and book: one turn of the event loop is the lock.
A retry is free until the first byte reaches the client; after it an answer can only go on or be broken off.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from time import monotonic

from gateway import legs
from gateway.account import Accounts
from gateway.answer import Failure, GatewayError
from gateway.attempts import break_off, nobody, retry
from gateway.client import Client
from gateway.endpoints import EndpointTable
from gateway.exchange import Exchange
from gateway.gate import Gate
from gateway.openai import Call, parse
from gateway.relay import UpstreamBroke
from gateway.snapshot import Route, Snapshot
from gateway.split import dispatch as split
from gateway.split.handoffs import Handoffs
from policies import run

log = logging.getLogger("penstock")


class Gateway:
    """What the line works with. `snapshot` is replaced whole; the rest is live and outlives it."""

    __slots__ = ("accounts", "endpoints", "gate", "handoffs", "snapshot")

    def __init__(
        self, snapshot: Snapshot, endpoints: EndpointTable, gate: Gate, accounts: Accounts, handoffs: Handoffs
    ) -> None:
        self.snapshot = snapshot
        self.endpoints = endpoints
        self.gate = gate
        self.accounts = accounts
        self.handoffs = handoffs


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
        gateway.gate.release(x.body_bytes)
        gateway.accounts.close(x)


async def _line(gateway: Gateway, x: Exchange, client: Client) -> None:
    snapshot, gate = gateway.snapshot, gateway.gate
    if snapshot.tenants:
        x.tenant = snapshot.authenticate(client.headers)
    body = client.body_at_hand() or await client.body(partial(x.hold, gate))
    x.received_at = monotonic()
    x.hold(gate, len(body))
    call = x.call = parse(body, x.api, snapshot.routes, x.id, x.tenant)
    del body  # from here the call owns the bytes, and lets go of them when no retry can need them
    route = snapshot.routes[call.asked_model]
    x.model = route.name
    x.parsed_at = monotonic()
    room = route.room
    with room if room.take() else await room.enter(gateway.endpoints.ask(call.request, None, ())):
        x.admitted_at = monotonic()
        if route.split is None:
            await _dispatch(gateway, x, client, route, call)
        else:
            await split.dispatch(gateway, route.split, x, client, route, call)


async def _dispatch(gateway: Gateway, x: Exchange, client: Client, route: Route, call: Call) -> None:
    """Pick, book and send, until an endpoint answers or nothing is left to try."""
    endpoints, request, policy = gateway.endpoints, call.request, route.policy
    fingerprint = x.fingerprint = endpoints.prefixes.of(call, route.name) if policy.reads_prefix else None
    try:
        while True:
            pick = x.pick = run.pick(policy, endpoints.ask(request, fingerprint, x.retries), route.candidates)
            if pick is None:
                raise nobody(x, route)
            x.picked_at = monotonic()
            with endpoints.book(pick, request, fingerprint) as booking:
                try:
                    return await legs.single(route, x, call, client, booking)
                except UpstreamBroke as broke:
                    booking.failed(broke)
                    problem = broke
            if x.committed:
                return break_off(x, client, problem)
            x.retries.append(pick.candidate.endpoint.name)
            await retry(gateway, x, problem)
    finally:
        if x.retrying:
            gateway.gate.give_back_turn()


def _apologise(x: Exchange, client: Client) -> None:
    if x.committed:
        client.hang_up()
    else:
        client.refuse(GatewayError(Failure.INTERNAL, "The gateway failed on this request."), x.id)
