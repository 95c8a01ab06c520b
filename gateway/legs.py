"""One leg: a booked endpoint gets the request and its answer flows to the client.

The engine sees a request of ours: a fixed path, our length, an allow-list of the client's headers, its own key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from gateway.answer import reshaped
from gateway.booking import Booking
from gateway.client import Client
from gateway.exchange import Exchange
from gateway.openai import Api, Call
from gateway.relay import Relay, UpstreamBroke
from gateway.rename import Renamer
from gateway.slo import SESSION, Fields
from gateway.trace import passed_on
from gateway.upstream_error import MODEL_GONE
from kvtransfer.dialects import known_members
from policies.model import EngineKind

if TYPE_CHECKING:
    from gateway.snapshot import Route

_MODEL_GONE = re.compile(rb"[Mm]odel .{1,256} (does not exist|not found)")  # as vLLM and SGLang put it
TRTLLM = EngineKind.TRTLLM  # asking an Enum for a member takes ten times as long
OWN_TROUBLE = frozenset({401, 403, 407, 408, 429})  # our key for it, its queue: nothing the client could mend


async def single(route: Route, x: Exchange, call: Call, client: Client, booking: Booking) -> None:
    """Serve the exchange from the booked endpoint. Raises UpstreamBroke when another endpoint might do better."""
    head, sent, relay = prepare(route, x, call, client, booking, x.first_token)
    x.booking, x.relay, x.sent = booking, relay, sent
    x.sent_at = monotonic()
    await booking.upstream.send(head, sent, relay, client)
    settle(x, client, relay, booking)


def prepare(
    route: Route, x: Exchange, call: Call, client: Client, booking: Booking, on_first: Callable[[], None]
) -> tuple[bytes, Call, Relay]:
    """The head and the body for the booked endpoint, and the relay of its answer."""
    endpoint = booking.endpoint
    served = route.engine_name or endpoint.served_model or route.name
    sent = call
    if served != call.request.model or endpoint.engine is TRTLLM:  # no lookup: an Enum's hash is slow
        sent = call.fitted(served, known_members(endpoint.engine, chat=call.api is Api.CHAT))
    if call.salt and endpoint.salt_member:
        sent = sent.salted(call.salt_member(endpoint.salt_member))
    relay = Relay(
        answer_headers(x, client, endpoint.name),
        on_first,
        client.http_1_0,
        Renamer(served, call.asked_model) if served != call.asked_model else None,
        gaps=x.gaps,
        choices=call.request.choices,
    )
    head = booking.upstream.head(x.api) + request_headers(x, client.headers, len(sent.body), endpoint.name)
    return head, sent, relay


def settle(x: Exchange, client: Client, relay: Relay, booking: Booking) -> None:
    """The answer is over. Raises UpstreamBroke when it was trouble of the engine's own."""
    if relay.refused:
        pass_on(x, client, relay, booking.endpoint.name)
    elif relay.failed_in_stream:
        x.interrupted("engine_error")
        booking.failed(UpstreamBroke("engine_error", "error event in the stream"))
    else:
        x.status = 200
        booking.served(relay.usage)


def pass_on(x: Exchange, client: Client, relay: Relay, endpoint: str) -> None:
    """The 4xx of an engine is about the request, so it goes to the client. Raises UpstreamBroke for what is not."""
    status = refusal(relay)
    x.status, x.outcome, x.reason = status, "refused", "engine"
    told = [("x-request-id", x.id), ("x-should-retry", "false"), ("x-penstock-endpoint", endpoint)]
    client.answer(status, reshaped(status, relay.refusal), told)


def refusal(relay: Relay) -> int:
    """The status of an engine's word about the request; UpstreamBroke when it is trouble of the engine's own."""
    status = relay.status
    if status == 404 and _MODEL_GONE.search(relay.refusal):
        raise UpstreamBroke(MODEL_GONE, "the engine does not have the model any more")
    if not 400 <= status < 500 or status in OWN_TROUBLE:
        raise UpstreamBroke(f"status_{status}", f"the engine answered {status}")
    return status


def answer_headers(x: Exchange, client: Client, endpoint: str) -> bytes:
    """What the client is told besides the answer."""
    tier = f"x-penstock-tier: {x.tier}\r\n" if x.tier else ""
    last = "connection: close\r\n" if client.closes else ""
    return (
        f"x-request-id: {x.id}\r\nx-penstock-endpoint: {endpoint}\r\n{tier}{last}"
        "cache-control: no-cache\r\nx-accel-buffering: no\r\n"
    ).encode()


def request_headers(x: Exchange, headers: Mapping[str, str], length: int, endpoint: str) -> bytes:
    """The lines that are this request's own, and the blank one."""
    passed = _passed(headers) if x.trace is None else forwarded(headers) + x.trace.leg("whole", endpoint, monotonic())
    lines = f"x-request-id: {x.id}\r\ncontent-length: {length}\r\n{passed}\r\n"
    return lines.encode("utf-8", "surrogateescape")


def _passed(headers: Mapping[str, str]) -> str:
    """The lines of the client's own that engines see. Requests on a connection mostly share their headers, which then
    remember the lines."""
    if not isinstance(headers, Fields):
        return forwarded(headers) + passed_on(headers)
    lines = headers.passed
    if lines is None:
        lines = headers.passed = forwarded(headers) + passed_on(headers)
    return lines


def forwarded(headers: Mapping[str, str]) -> str:
    """What of a client's headers an engine gets to see, as lines: it recognises a conversation. The trace's context is
    trace.py's."""
    session = headers.get(SESSION)
    return "" if session is None else f"{SESSION}: {session}\r\n"
