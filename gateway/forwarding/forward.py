"""One attempt to serve a request at one endpoint: the request to the engine, and its answer.

The gateway builds the request itself. It has a fixed path, its own length, the endpoint's key
and some of the client's headers (engine_request_headers.py). gateway/proxy/attempt_loop.py picks
the endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gateway.admission.quota_charges import BackgroundResponse
from gateway.fleet.reservation import Reservation
from gateway.forwarding.engine_request_headers import engine_request_head
from gateway.forwarding.response_headers import response_headers
from gateway.http.client_interface import Client
from gateway.protocol.api_table import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Api
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.handoff_members import shows_usage
from gateway.protocol.request.multipart import form_type
from gateway.protocol.response.model_and_usage_rewrite import (
    ANY_NAME,
    ModelNameRewriter,
    versioned_name,
)
from gateway.protocol.response.named_event_relay import NamedEventRelay
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.resumable_relay import RecordedRelay
from gateway.protocol.response.token_ledger import Ledger, LedgerRecorder
from gateway.protocol.response.transcript_relay import TranscriptRelay
from gateway.protocol.response.whole_answer_to_stream import (
    EventWriter,
    write_chunks,
    write_chunks_with_usage,
    write_message,
    write_response,
)
from gateway.request_record import Exchange
from kvtransfer.dialects import known_members
from policies.routing_types import EngineKind

# Local names: Enum attribute access is slow before Python 3.12.
TRTLLM, OPENAI = EngineKind.TRTLLM, EngineKind.OPENAI
_EVENT_WRITERS: Mapping[Api, EventWriter] = {MESSAGES: write_message, RESPONSES: write_response}


def prepare(
    exchange: Exchange,
    call: Call,
    client: Client,
    reservation: Reservation,
    on_first: Callable[[], None],
    served: str,
) -> tuple[bytes, Call, Relay]:
    """Build a request to an engine; return its head, its body and the Relay for its answer.

    on_first  function that is called at the first generated token
    served    the endpoint's name of the model
    """
    endpoint = reservation.endpoint
    body = call
    # No lookup in a mapping by engine: hashing an Enum is slow.
    if served != call.request.model or endpoint.engine is TRTLLM:
        body = call.adapted_to(served, _accepted_members(call.api, endpoint.engine))
    if call.salt and endpoint.salt_member:
        body = body.with_member(call.salt_member(endpoint.salt_member))
    if not call.api.is_plain:
        return _prepare_special(exchange, body, client, reservation, on_first, served)
    relay = Relay(  # in compiled code, keyword arguments would double the cost of this call
        response_headers(exchange, client, endpoint.name),
        on_first,
        client.is_http_1_0,
        new_rewriter(endpoint.engine, call.api, served, call.requested_model),
        False,
        exchange.gaps,
        call.request.choices,
        None if exchange.new_translator is None else exchange.new_translator(),
    )
    if call.request.stream:
        relay.event_writer = chunk_writer(call.members)
        relay.asked_at = exchange.accepted_at
    start = reservation.upstream.request_head(call.api.path)
    head = engine_request_head(start, exchange, client.headers, len(body.body), endpoint.name)
    return head, body, relay


def chunk_writer(members: Mapping[str, msgspec.Raw]) -> EventWriter:
    """Return the function that turns a whole answer of a chat or completion into stream events.

    It is needed for engines that send a whole answer although a stream was requested.

    members  the request's JSON members, which say whether the stream must show token counts
    """
    return write_chunks_with_usage if shows_usage(members) else write_chunks


def new_rewriter(
    engine: EngineKind, api: Api, served: str, requested_model: str
) -> ModelNameRewriter | None:
    """Return the object that replaces the engine's model name in an answer; None if none is needed.

    A provider's answer may name another model than the request: a dated version, or what an
    alias stands for. In chats, completions and embeddings, any name is replaced. In other
    answers only a version is, as `model` may be part of the content, such as a tool's argument.
    """
    if engine is OPENAI:
        is_name = api is CHAT or api is COMPLETIONS or api is EMBEDDINGS
        names = ANY_NAME if is_name else versioned_name(served)
        return ModelNameRewriter(served, requested_model, names)
    return ModelNameRewriter(served, requested_model) if served != requested_model else None


def _prepare_special(
    exchange: Exchange,
    body: Call,
    client: Client,
    reservation: Reservation,
    on_first: Callable[[], None],
    served: str,
) -> tuple[bytes, Call, Relay]:
    api, requested_model, name = body.api, body.requested_model, reservation.endpoint.name
    engine = reservation.endpoint.engine
    headers, gaps = response_headers(exchange, client, name), exchange.gaps
    rewriter = new_rewriter(engine, api, served, requested_model)
    is_http_1_0 = client.is_http_1_0
    if api.grammar is None:
        relay: Relay = TranscriptRelay(headers, on_first, is_http_1_0, rewriter, gaps)
        relay.asked_at = exchange.accepted_at
    else:
        grammar, errors = api.grammar, api.errors
        relay = NamedEventRelay(headers, on_first, is_http_1_0, rewriter, gaps, grammar, errors)
        relay.asked_at = exchange.accepted_at
        if body.request.stream:
            relay.event_writer = _EVENT_WRITERS.get(api)
    if exchange.response_ids is not None:
        body = _with_response_id(exchange, body, name, requested_model)
    start = reservation.upstream.request_head(api.path)
    if api.is_form:
        start = start.replace(b"application/json", form_type(body.body), 1)
    head = engine_request_head(start, exchange, client.headers, len(body.body), name)
    return head, body, relay


def _with_response_id(exchange: Exchange, body: Call, endpoint: str, model: str) -> Call:
    assert exchange.response_ids is not None
    previous = "" if exchange.stored_at is None else exchange.stored_at.response_id
    name = exchange.response_ids.new(exchange.tenant, endpoint, model, previous)
    charge = exchange.quota
    if charge is not None and charge.concurrency is not None:
        # Engines read some other values than true as true; a wrong guess here is corrected later.
        in_background = bytes(body.members.get("background", b"null")) not in (b"null", b"false")
        charge.background = BackgroundResponse(name, endpoint) if in_background else None
    return body.with_member(b',"request_id":"%b"' % name.encode())


def _accepted_members(api: Api, engine: EngineKind) -> frozenset[str] | None:
    if api is not CHAT and api is not COMPLETIONS:
        return None
    return known_members(engine, chat=api is CHAT)


def new_recorded_relay(
    exchange: Exchange,
    call: Call,
    client: Client,
    headers: bytes,
    ledger: Ledger,
    served: str,
    on_first: Callable[[], None] | None = None,
) -> RecordedRelay:
    """Return a relay that forwards an answer and records its tokens, to continue it if it breaks.

    headers   header lines for the client
    ledger    the record of the tokens
    served    the endpoint's name of the model
    on_first  function that is called at the first generated token
    """
    recorder = LedgerRecorder(ledger, ledger.render_first, served, call.requested_model)
    # The recorder holds back the answer until its first token. Until then the request may be
    # retried as a whole, but not once the client has seen the answer's role.
    relay = RecordedRelay(
        headers,
        on_first,
        client.is_http_1_0,
        recorder,
        hold_until_token=True,
        chunk_gaps=exchange.gaps,
        translator=None if exchange.new_translator is None else exchange.new_translator(),
    )
    relay.event_writer = write_chunks_with_usage  # the ledger drops counts not asked for
    return relay
