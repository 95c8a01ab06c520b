"""Builds the prefill and the decode request of a split request, and interprets the prefill answer.

All code that depends on the engines' handoff protocol (dialect) is here.
gateway/disagg/pair_attempt.py and gateway/disagg/state_machine.py decide when a request is sent and
what follows.
"""

from __future__ import annotations

from time import monotonic
from typing import Protocol

from msgspec.structs import replace

from gateway.admission.pool_queue import PoolQueue
from gateway.config import Resume
from gateway.disagg.handoffs import Handoffs
from gateway.disagg.pairing import SplitRoute
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.reservation import Reservation
from gateway.forwarding.engine_request_headers import client_lines
from gateway.forwarding.forward import chunk_writer, new_recorded_relay
from gateway.forwarding.response_headers import response_headers
from gateway.http.client_interface import Client
from gateway.protocol.api_table import CHAT
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.handoff_members import edited, shows_usage
from gateway.protocol.response.model_and_usage_rewrite import (
    CachedTokensRewriter,
    ModelNameRewriter,
)
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.resume_eligibility import ContinuationTerms as ResumeTerms
from gateway.protocol.response.resume_eligibility import continuation_terms, with_token_ids
from gateway.protocol.response.token_ledger import Ledger
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.protocol.trace_context import propagated_headers
from gateway.protocol.upstream_error import UpstreamError
from gateway.request_record import Exchange, SplitRecord
from kvtransfer.dialects import (
    DecodeRequest,
    Dialect,
    FinishedResponse,
    HandoffTerms,
    PrefillIdentity,
    PrefillResponse,
    Prerequisite,
    RequestEdits,
    UnusableResponse,
    as_events,
    encode_members,
    known_members,
)
from policies.prefix.fingerprint import Fingerprint
from policies.pricing.split_decision import EndpointPair
from policies.routing_types import Endpoint, EngineKind, Request

# A release request asks for one token, like a prefill request, whatever the client asked for: a
# body that the prefiller accepted so is valid for the decoder too.
_RELEASE = encode_members({"max_tokens": b"1", "stream": b"false"})
_OUTPUT_MEMBERS = frozenset(
    (
        *("max_tokens", "stream", "stream_options", "max_completion_tokens", "min_tokens"),
        *("logprobs", "top_logprobs"),
    )
)

# A local name: Enum attribute access is slow before Python 3.12.
_FIRST_ANSWER = Prerequisite.FIRST_ANSWER

_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class SplitGateway(Protocol):
    """The interface of the gateway that attempts at split requests use."""

    endpoints: EndpointTable
    handoffs: Handoffs

    def count_unsent(self, exchange: Exchange, problem: UpstreamError, /) -> bool:
        """Count a failed attempt as unsent, if no engine has received it; return whether it was.

        An unsent attempt does not count as a retry.
        """


class SplitModel(Protocol):
    """The interface of a model's route, for attempts at split requests for the model."""

    @property
    def name(self) -> str: ...
    @property
    def pool_queue(self) -> PoolQueue: ...
    @property
    def resume(self) -> Resume | None: ...

    def resolve_name(self, endpoint: Endpoint, /) -> str:
        """Return the name by which the endpoint's engine knows the request's model."""


class SplitContext:
    """A request that may be split between two engines, with the objects that its attempts use."""

    __slots__ = ("call", "client", "exchange", "fingerprint", "gateway", "route", "split")

    def __init__(
        self,
        gateway: SplitGateway,
        route: SplitModel,
        split: SplitRoute,
        exchange: Exchange,
        client: Client,
        call: Call,
        fingerprint: Fingerprint,
    ) -> None:
        self.gateway, self.route, self.split = gateway, route, split
        self.exchange, self.client, self.call = exchange, client, call
        self.fingerprint = fingerprint


def one_token(request: Request, pair: EndpointPair) -> Request:
    """Return a copy of the request for the prefill endpoint, which generates only one token.

    In a pull, its prompt is only the beginning that is fetched from there.
    """
    if pair.is_pull:
        beginning = min(request.prompt_tokens, pair.decode.cached_tokens)
        return replace(request, output_tokens=1, choices=1, prompt_tokens=beginning)
    return replace(request, output_tokens=1, choices=1)


def attempt_dialect(split: SplitRoute, pair: EndpointPair) -> Dialect:
    """Return the protocol of the handoff between two endpoints, which is another one for a pull."""
    return (split.dialect.pulls or split.dialect) if pair.is_pull else split.dialect


class LegRequests:
    """Builds the requests to both engines of a split request, and interprets the prefill answer.

    It keeps the parts of the client's request that a release request needs, which may be sent after
    the client has disconnected and the body has been freed.

    terms          values that both requests contain, such as the request id, the prefill host, and
                   the prefill engine's identity, which may be learned later
    _resume_terms  how a broken stream could be continued; None if that would not be exact
    _dialect       the handoff protocol of the attempt
    _shortened     JSON members that shorten the prompt to the beginning that is pulled; b"" if the
                   request is split
    _header        response header line that names the prefill endpoint
    _cache_report  receives the prefill engine's count of cached tokens, which the client gets; None
                   if the client gets the decode engine's count
    """

    __slots__ = (
        *("_cache_report", "_context", "_dialect", "_header", "_lines", "_members", "_prefill"),
        *("_record", "_resume_terms", "_shortened", "terms"),
    )

    def __init__(
        self, context: SplitContext, record: SplitRecord, pair: EndpointPair, number: int
    ) -> None:
        prefill = pair.prefill.candidate.endpoint
        exchange, headers, call = context.exchange, context.client.headers, context.call
        split = context.split
        facts = split.facts[prefill.name]
        self._context, self._record, self._prefill = context, record, prefill.name
        self._dialect = dialect = attempt_dialect(split, pair)
        self._shortened, self._header = b"", facts.header
        if pair.is_pull:
            self._shortened = dialect.truncate(pair.decode.cached_tokens)
            self._header = b"x-penstock-pulled-from: %b\r\n" % prefill.name.encode()
        self._members = call.members
        self._cache_report: CachedTokensRewriter | Ledger | None = None
        self._resume_terms: ResumeTerms | None = None
        if context.route.resume is not None and dialect.engine == EngineKind.VLLM:
            self._resume_terms = continuation_terms(call)
        # A copy of an earlier attempt may still run on an engine, so each attempt has an id of its
        # own.
        retries = exchange.retries
        request_id = f"{exchange.id}-{len(retries)}" if retries else exchange.id
        trace_lines = "" if exchange.trace is not None else propagated_headers(headers)
        self._lines = f"{client_lines(headers)}{trace_lines}content-length: "
        self.terms = HandoffTerms(
            request_id,
            number,
            call.api is CHAT,
            facts.host,
            facts.bootstrap,
            context.gateway.handoffs.identity(prefill.name, number),
        )

    def release(self) -> None:
        """Free this object's parts of the client's request body.

        The Call, which also refers to the body, frees it at the first token of the answer.
        """
        self._members = {}

    def set_identity(self, identities: tuple[PrefillIdentity, ...]) -> None:
        """Store the identities of the prefill engine's ranks, for this and later attempts."""
        handoffs = self._context.gateway.handoffs
        handoffs.set_identity(self._prefill, identities)
        identity = handoffs.identity(self._prefill, self.terms.number)
        self.terms = replace(self.terms, identity=identity)

    def prefill(self, reservation: Reservation) -> tuple[bytes, bytes]:
        edits = self._dialect.prefill(self.terms)
        if self._shortened:
            edits = replace(edits, put=edits.put + self._shortened)
        return self._request(reservation, edits, "prefill")

    def decode(
        self, reservation: Reservation, handover: DecodeRequest | None
    ) -> tuple[bytes, bytes]:
        """Return the head and the body of the request to the decode engine, as bytes to send.

        `handover` tells the engine where to fetch the KV. With None, the result is the client's own
        request, which the engine computes from the start.
        """
        if handover is not None:
            edits, role = handover.edits, "decode"
        else:
            edits = RequestEdits(
                keep=known_members(reservation.endpoint.engine, chat=self.terms.chat)
            )
            role = "whole"
        if self._resume_terms is not None:
            edits = with_token_ids(edits)
        return self._request(reservation, edits, role)

    def release_request(
        self,
        reservation: Reservation | LiveEndpoint,
        handover: DecodeRequest,
        *,
        is_whole: bool = False,
    ) -> tuple[bytes, bytes]:
        """Return head and body of a release request, which makes the prefill engine free its KV.

        It goes to a decode engine and generates one token, which is discarded. When it arrives, the
        prefill engine's memory may already hold the KV of another request. Therefore the request
        has its own cache salt: no other request can use what the decode engine caches for it.
        `is_whole` tells that the KV is that of the whole prompt, although a pull asked for less.
        """
        edits, apart = handover.edits, self._dialect.cache_salt_member
        put, drop = edits.put + _RELEASE, edits.drop | _OUTPUT_MEMBERS
        if not is_whole:
            put += self._shortened
        if apart is not None:
            put += encode_members({apart: b'"unread %d"' % self.terms.number})
            drop |= {apart}
        return self._request(reservation, replace(edits, put=put, drop=drop), "")

    def relay(self, endpoint: Endpoint, handover: DecodeRequest | None) -> Relay:
        """Return the relay that forwards the decode engine's answer to the client.

        If a broken stream can be continued, the relay also records the answer's tokens. If the
        decode engine counts transferred tokens as cached, the relay replaces its count.
        """
        context = self._context
        if handover is None and self._shortened:  # nothing was pulled
            self._header = b""
        corrects = handover is not None and not handover.reports_own_cache
        self._cache_report = None
        context.exchange.ledger = None
        terms, resume = self._resume_terms, context.route.resume
        if terms is not None and resume is not None:
            ledger = context.exchange.ledger = Ledger(terms, resume.tokens)
            return self._recorded_relay(endpoint, ledger, corrects)
        return self._plain_relay(endpoint, handover is not None, corrects)

    def _recorded_relay(self, endpoint: Endpoint, ledger: Ledger, corrects: bool) -> Relay:
        # Return a relay that records the answer's tokens in `ledger`, to continue a broken stream.
        exchange, client, call = self._context.exchange, self._context.client, self._context.call
        if corrects:
            self._cache_report = ledger
            ledger.cached_tokens = self._record.cached_tokens
        served = self._context.route.resolve_name(endpoint)
        headers = response_headers(exchange, client, endpoint.name) + self._header
        return new_recorded_relay(exchange, call, client, headers, ledger, served)

    def _plain_relay(self, endpoint: Endpoint, holds_until_token: bool, corrects: bool) -> Relay:
        exchange, client, call = self._context.exchange, self._context.client, self._context.call
        served = self._context.route.resolve_name(endpoint)
        renamer: ModelNameRewriter | None = None
        if corrects and shows_usage(self._members):
            renamer = corrector = self._cache_report = CachedTokensRewriter(
                served, call.requested_model
            )
            corrector.cached_tokens = self._record.cached_tokens
        elif served != call.requested_model:
            renamer = ModelNameRewriter(served, call.requested_model)
        relay = Relay(
            response_headers(exchange, client, endpoint.name) + self._header,
            None,
            client.is_http_1_0,
            renamer,
            holds_until_token,
            exchange.gaps,
            translator=None if exchange.new_translator is None else exchange.new_translator(),
        )
        if call.request.stream:
            relay.event_writer = chunk_writer(self._members)
            relay.asked_at = exchange.accepted_at
        return relay

    def note_usage(self, usage: TokenUsage) -> None:
        """Record the cached prompt tokens that the prefill engine reported; 0 if it reported none.

        The client gets this number as its count of cached tokens.
        """
        self._record.cached_tokens = usage.cached_tokens
        if self._cache_report is not None:
            self._cache_report.cached_tokens = usage.cached_tokens or 0

    def interpret(
        self, answer: PrefillResponse | UnusableResponse, *, alone: bool
    ) -> DecodeRequest | UnusableResponse | FinishedResponse | None:
        """Return what to do after a prefill engine's complete answer.

        alone  whether no decode engine has received the request yet

        The result is one of these:

        - a decode request to send
        - None: the decode engine has received its request already
        - an answer that already finishes the client's request
        - the reason why the prefill answer cannot be used
        """
        record = self._record
        if isinstance(answer, UnusableResponse):
            return answer
        record.cached_tokens = answer.cached_tokens or 0
        if self._cache_report is not None:
            self._cache_report.cached_tokens = record.cached_tokens
        meaning = self._meaning_of(answer, alone)
        if isinstance(meaning, DecodeRequest):
            record.transport = meaning.transport
        return meaning

    def interpret_late(
        self, answer: PrefillResponse | UnusableResponse
    ) -> DecodeRequest | UnusableResponse | FinishedResponse | None:
        """Return what a prefill answer means that comes when no one needs it any more.

        Its counts are not recorded: another engine may be computing the prompt by then.
        """
        if isinstance(answer, UnusableResponse):
            return answer
        return self._meaning_of(answer, True)

    def _meaning_of(
        self, answer: PrefillResponse, alone: bool
    ) -> DecodeRequest | UnusableResponse | FinishedResponse | None:
        dialect = self._dialect
        if dialect.needs is _FIRST_ANSWER:
            identities, expected = dialect.identify(answer.body), self.terms.identity
            if expected is None:
                self.set_identity(identities)
            elif identities and expected not in identities:
                self.set_identity(identities)
                return UnusableResponse(
                    "the prefill engine has another id than the decode engine was given"
                )
        return dialect.decode(self.terms, answer) if alone else dialect.check(answer)

    def finished(self, answer: FinishedResponse) -> bytes:
        """Return the prefill engine's answer as a complete HTTP response to the client.

        It is one JSON body, or server-sent events if the client requested a stream.
        """
        if not self._context.call.request.stream:
            return _JSON % len(answer.body) + answer.body
        events = as_events(answer.body, usage=shows_usage(self._members))
        return _SSE % len(events) + events

    def _request(
        self, reservation: Reservation | LiveEndpoint, edits: RequestEdits, role: str
    ) -> tuple[bytes, bytes]:
        # Return head and body of a request to an engine: the client's body with these edits.
        #
        # `role` names the request in traces; "" is a release request, which has neither trace
        # headers nor cache salt.
        context, endpoint = self._context, reservation.endpoint
        call, trace = context.call, context.exchange.trace
        served = context.route.resolve_name(endpoint)
        if (
            role and call.salt
        ):  # the same in both legs: a decoder finds the KV under the prefiller's salt
            put = edits.put + call.salt_member(endpoint.salt_member)
            edits = replace(edits, put=put)
        model = None if served == call.request.model else served
        body = edited(call.body, self._members, edits, model)
        request_id = self.terms.request_id
        if not role and self._shortened:
            # In a pull, it may run beside the client's request on one engine. Other dialects find
            # a handoff by its id.
            request_id += "-release"
        lines = f"x-request-id: {request_id}\r\n{self._lines}{len(body)}\r\n"
        if trace is not None and role:
            lines += trace.add_leg(role, endpoint.name, monotonic())
        for name, value in edits.headers:
            lines += f"{name}: {value}\r\n"
        head = reservation.upstream.request_head(call.api.path)
        return head + (lines + "\r\n").encode("utf-8", "surrogateescape"), body
