"""What is said on the two legs of a pair: the requests a dialect wants, and what the prefill answer means.

Everything that depends on the dialect is here. Not here: when something is sent, and what follows (pair.py, life.py).
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from gateway.booking import Booking
from gateway.client import Client
from gateway.exchange import Exchange, SplitRecord
from gateway.legs import answer_headers, forwarded
from gateway.openai import Api, Call
from gateway.relay import Relay
from gateway.rename import Corrector, Renamer
from gateway.snapshot import Route
from gateway.split.edit import edited, shows_usage
from gateway.split.pairing import SplitRoute
from gateway.told import Usage
from gateway.trace import passed_on
from kvtransfer.dialects import (
    Answer,
    Edits,
    Finished,
    Handover,
    Identity,
    Needs,
    Terms,
    Unusable,
    as_events,
    known_members,
    members,
)
from policies.fingerprint import Fingerprint
from policies.model import Endpoint, Request

if TYPE_CHECKING:
    from gateway.roster import LiveEndpoint
    from gateway.serve import Gateway

# One token that nobody reads, in place of all that a client says of how many it wants and how. As in a prefill request:
# what P has found in order D does too.
_UNREAD = members({"max_tokens": b"1", "stream": b"false"})
_WANTED = frozenset(
    ("max_tokens", "stream", "stream_options", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs")
)

# Before Python 3.12 an Enum finds its members slowly: those that every split request passes are at hand.
_CHAT, _FIRST_ANSWER = Api.CHAT, Needs.FIRST_ANSWER

_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Work:
    """One request of a model that is split, and all that is needed to serve it."""

    __slots__ = ("call", "client", "fingerprint", "gateway", "route", "split", "x")

    def __init__(
        self,
        gateway: Gateway,
        route: Route,
        split: SplitRoute,
        x: Exchange,
        client: Client,
        call: Call,
        fingerprint: Fingerprint,
    ) -> None:
        self.gateway, self.route, self.split, self.x = gateway, route, split, x
        self.client, self.call, self.fingerprint = client, call, fingerprint


def one_token(request: Request) -> Request:
    """What a prefill endpoint is asked for."""
    return replace(request, output_tokens=1, choices=1)


class Words:
    """The words of one attempt at one request. `terms` hold for both legs; the decoder's may be corrected later.

    What they are made of may be needed when the client has gone, and the call has let go of it.
    """

    __slots__ = ("_corrector", "_facts", "_lines", "_members", "_prefill", "_record", "_work", "terms")

    def __init__(self, work: Work, record: SplitRecord, prefill: Endpoint, number: int) -> None:
        x, facts, headers = work.x, work.split.facts[prefill.name], work.client.headers
        self._work, self._record = work, record
        self._prefill, self._facts = prefill.name, facts
        self._members = work.call.members
        self._corrector: Corrector | None = None
        request_id = f"{x.id}-{len(x.retries)}" if x.retries else x.id  # a copy of it may still live on an engine
        context = "" if x.trace is not None else passed_on(headers)
        self._lines = f"x-request-id: {request_id}\r\n{forwarded(headers)}{context}content-length: "
        self.terms = Terms(
            request_id,
            number,
            work.call.api is _CHAT,
            facts.host,
            facts.bootstrap,
            work.gateway.handoffs.identity(prefill.name, number),
        )

    def forget(self) -> None:
        """Hold nothing of the client's body any more than the call does."""
        self._members = {}

    def introduced(self, identities: tuple[Identity, ...]) -> None:
        """The prefill engine has told who it is."""
        self._work.gateway.handoffs.learn(self._prefill, identities)
        identity = self._work.gateway.handoffs.identity(self._prefill, self.terms.number)
        self.terms = msgspec.structs.replace(self.terms, identity=identity)

    def prefill(self, place: Booking) -> tuple[bytes, bytes]:
        """Head and body of the prefill request."""
        return self._request(place, self._work.split.dialect.prefill(self.terms), "prefill")

    def decode(self, place: Booking, handover: Handover | None) -> tuple[bytes, bytes]:
        """Head and body of the decode request; without a handover, of the client's own."""
        if handover is not None:
            return self._request(place, handover.edits, "decode")
        kept = known_members(place.endpoint.engine, chat=self.terms.chat)
        return self._request(place, Edits(keep=kept), "whole")

    def farewell(self, place: Booking | LiveEndpoint, handover: Handover) -> tuple[bytes, bytes]:
        """Head and body of a decode request that only has the KV fetched, for one token nobody reads. The blocks may be
        another request's by then: where the engine caches what it fetches, nobody finds it."""
        edits, apart = handover.edits, self._work.split.dialect.apart
        put, drop = edits.put + _UNREAD, edits.drop | _WANTED
        if apart is not None:
            put, drop = put + members({apart: b'"unread %d"' % self.terms.number}), drop | {apart}
        return self._request(place, msgspec.structs.replace(edits, put=put, drop=drop), "")

    def relay(self, endpoint: Endpoint, handover: Handover | None) -> Relay:
        """What brings the decoder's answer to the client, with the prefiller's word on cached tokens if needed."""
        work = self._work
        renamer: Renamer | None = None
        served, asked = work.route.engine_name or endpoint.served_model or work.route.name, work.call.asked_model
        if handover is not None and not handover.reports_own_cache and shows_usage(self._members):
            renamer = self._corrector = Corrector(served, asked)
            self._corrector.cached_tokens = self._record.cached_tokens
        elif served != asked:
            renamer = Renamer(served, asked)
        headers = answer_headers(work.x, work.client, endpoint.name) + self._facts.header
        return Relay(headers, None, work.client.http_1_0, renamer, handover is not None, work.x.gaps)

    def prefilled(self, usage: Usage) -> None:
        """Note how much of the prompt the prefill engine had cached; the client is told 0 if it does not report it."""
        self._record.cached_tokens = usage.cached_tokens
        if self._corrector is not None:
            self._corrector.cached_tokens = usage.cached_tokens or 0

    def meaning(self, answer: Answer | Unusable, *, alone: bool) -> Handover | Unusable | Finished | None:
        """What a prefill answer means; `alone` while no decoder has the request yet. None: all is as it should be."""
        dialect, record = self._work.split.dialect, self._record
        if isinstance(answer, Unusable):
            return answer
        record.cached_tokens = answer.cached_tokens or 0
        if self._corrector is not None:
            self._corrector.cached_tokens = record.cached_tokens
        if dialect.needs is _FIRST_ANSWER:
            found, told = dialect.identify(answer.body), self.terms.identity
            if told is None:
                self.introduced(found)
            elif found and told not in found:
                self.introduced(found)
                return Unusable("the prefill engine is not the one that its decoder was told of")
        if not alone:
            return dialect.check(answer)
        meant = dialect.decode(self.terms, answer)
        if isinstance(meant, Handover):
            record.transport = meant.transport
        return meant

    def finished(self, answer: Finished) -> bytes:
        """The prefill answer as an engine's answer to the client's own request: an event stream if it asked for one."""
        if not self._work.call.request.stream:
            return _JSON % len(answer.body) + answer.body
        events = as_events(answer.body, usage=shows_usage(self._members))
        return _SSE % len(events) + events

    def _request(self, place: Booking | LiveEndpoint, edits: Edits, role: str) -> tuple[bytes, bytes]:
        """`role` as a trace calls it; "" for what no trace tells of, which has a cache salt of its own if any."""
        work, endpoint, trace = self._work, place.endpoint, self._work.x.trace
        call, served = work.call, work.route.engine_name or endpoint.served_model or work.route.name
        if role and call.salt:  # both legs get the same one: a decoder finds the KV under the prefiller's
            put = edits.put + call.salt_member(endpoint.salt_member)
            edits = msgspec.structs.replace(edits, put=put)
        body = edited(call.body, self._members, edits, None if served == call.request.model else served)
        lines = f"{self._lines}{len(body)}\r\n"
        if trace is not None and role:
            lines += trace.leg(role, endpoint.name, monotonic())
        for name, value in edits.headers:
            lines += f"{name}: {value}\r\n"
        return place.upstream.head(work.x.api) + (lines + "\r\n").encode("utf-8", "surrogateescape"), body
