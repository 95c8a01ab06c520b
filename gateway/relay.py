"""The stream machine: an engine's bytes in, the client's bytes out. Sans-IO; one path for streams and plain answers.

The engine's head is replaced by ours and held until the first body byte, so that everything before that byte may still
be retried elsewhere. The body passes as it came, chunk framing included: bytes are followed, not rebuilt. Only what
accounting needs is looked for: first token, events, usage, finish reason and a proper end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from gateway.answer import Failure, event_of
from gateway.framing import (
    LAST_CHUNK,
    MAX_HEAD,
    UNREAD,
    WHOLE,
    Body,
    ChunkedBody,
    FramingError,
    Head,
    RawBody,
    body_for,
    chunk,
    parse_head,
)
from gateway.likeness import GUESSES, Likeness, likeness
from gateway.meters import Histogram
from gateway.rename import Renamer
from gateway.told import (
    CONTENT,
    ENDS,
    ERROR_EVENT,
    ERROR_KEPT,
    LAST_WORD,
    REASON,
    USAGE,
    Usage,
    clients_fault,
    error_in,
    error_said,
    finished_choices,
    last_end,
    reason_in,
    reason_marker,
    told_all,
    undecided,
    usage_in,
)
from gateway.upstream_error import STOPPED as STOPPED
from gateway.upstream_error import UpstreamBroke as UpstreamBroke

ERROR_MOST = 64 * 1024 * 1024  # engines repeat a bad request in what they say of it
CARRY_LIMIT = 64 * 1024
TAIL = 16 * 1024

_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_CLOSED = b"connection: close\r\n\r\n"
_EVENT, _ERROR = b"\ndata:", b'"error"'


class State(Enum):
    """HEAD and HELD may still be retried elsewhere; FLOWING is committed: the client has bytes."""

    HEAD = auto()
    REFUSED = auto()
    HELD = auto()
    FLOWING = auto()
    DONE = auto()


HEAD, REFUSED, HELD, FLOWING, DONE = State  # asking an Enum for a member takes ten times as long


class Relay:
    """One answer on its way through: feed() what arrives, write what it returns, until `state` is DONE.

    headers    our own response headers, each ending in CRLF, without status line and framing
    on_first   called once, at the first generated token
    http_1_0   the client cannot read chunks: it gets the bare body and a close
    patient    a stream is held until its first token: engines show a role before they know whether there will be one
    gaps       where the times between a stream's pieces are counted; None for nearly all
    renamer    puts the client's alias in place of the engine's model name; None when they are the same
    choices    choices that the client asked for, each of which ends with a finish reason

    committed  a byte of the answer was handed to the client: from there on nothing can be retried
    failed_in_stream  it ended with an error event: the engine's own, or ours because it ended early
    refused    the engine answered other than 2xx, or told a fault in its first event: `status`, and what it said
    Times are those given to feed(); None until they happened.
    """

    __slots__ = (
        *("_body", "_carry", "_counts", "_done", "_finish", "_finished", "_guesses", "_held", "_last", "_like"),
        *("_pending", "_reason", "_reason_marker", "_rebuild", "_said", "_sse", "_torn", "_usage", "bytes_out"),
        *("choices", "committed", "events", "failed_in_stream", "first_byte_at", "first_token_at", "gaps", "head"),
        *("headers", "http_1_0", "last_at", "on_first", "patient", "refusal", "refused", "renamer", "state", "status"),
    )

    def __init__(
        self,
        headers: bytes,
        on_first: Callable[[], None] | None = None,
        http_1_0: bool = False,
        renamer: Renamer | None = None,
        patient: bool = False,
        gaps: Histogram | None = None,
        choices: int = 1,
    ) -> None:
        self.headers = headers
        self.on_first = on_first
        self.http_1_0 = http_1_0
        self.renamer = renamer
        self.patient = patient
        self.gaps = gaps
        self.choices = choices
        self.state = HEAD
        self.head: Head | None = None
        self.committed = self.refused = self.failed_in_stream = self._sse = False
        self.events = self.bytes_out = self.status = 0
        self.first_byte_at: float | None = None
        self.first_token_at: float | None = None
        self.last_at: float | None = None
        self.refusal = b""
        self._body: Body = UNREAD
        self._pending = b""  # an unfinished head or first event
        self._usage = b""  # the newest payload that tells token counts
        self._reason = b""  # the newest payload that tells why generation ended, until it is read
        self._counts: Usage | None = None
        self._finish: str | None = None

    @property
    def untouched(self) -> bool:
        """True while the engine has not answered a single byte."""
        return self.head is None and not self._pending

    @property
    def reusable(self) -> bool:
        """True when the engine's connection may carry another request."""
        body, head = self._body, self.head
        return head is not None and head.keep_alive and body.ended and not body.surplus

    def feed(self, data: bytes, now: float) -> bytes:
        """Bytes from the engine to bytes for the client. Raises UpstreamBroke when they make no sense."""
        if self.state is not FLOWING:
            return self._begin(data, now)
        if self._like is not None and not self._carry and self._like.fits(data):
            self._pass(self._like, data, now)
            return data
        if self.gaps is not None and self._sse and self.first_token_at is not None:
            self.gaps.observe(now - (self.last_at or now))
        self.last_at = now
        body = self._body
        try:
            payload = body.feed(data)
        except FramingError as error:
            self._torn = not self._rebuild and not body.rested  # what was good of it was followed, and not shown
            raise UpstreamBroke("framing", str(error)) from error
        if self._sse:
            if payload:
                self._watch(payload, now)
                if self._guesses and self._last is payload and self.first_token_at is not None:
                    self._guess(data, payload)
        elif payload:
            self._keep(payload, now)
        if self._rebuild:
            data = self._rebuilt(payload)
        elif self._held or body.partial:
            data = self._hold_back(data)
        if body.ended:
            data = self._end(data)
        self.bytes_out += len(data)
        return data

    def eof(self) -> bytes:
        """The engine closed its side. The last bytes for the client; raises UpstreamBroke if that cut the answer."""
        if self.head is None or not isinstance(self._body, RawBody):
            raise UpstreamBroke("truncated" if self.head else "no_answer", "the engine closed before its answer ended")
        if self.state is HELD:
            raise UpstreamBroke("truncated", "the engine closed before its answer began")
        self._body.ended = True
        if self.state is REFUSED:
            return self._collect(b"")
        out = self._end(self._rebuilt(b""))
        self.bytes_out += len(out)
        return out

    @property
    def at_seam(self) -> bool:
        """Whether an event of ours could follow what the client has: in a stream, between two events."""
        if not self._sse or self._body.ended or self._torn or not (self._rebuild or self._body.between):
            return False
        return not self._carry or (self.renamer is not None and not self.renamer.mid_event)

    def break_off(self, failure: Failure, message: str) -> bytes:
        """After the commit point: tell the client in-stream that the rest will not come, where framing allows it.

        In the middle of a chunk or an event nothing can be added; the connection's end has to say it.
        """
        if not self.at_seam:
            return b""
        event = b"" if self._told_all else event_of(failure, message)
        return event if self.http_1_0 else chunk(event) + LAST_CHUNK

    @property
    def _told_all(self) -> bool:
        """Whether the client has the last event: nothing may follow it."""
        return self._done

    @property
    def usage(self) -> Usage:
        """Token counts, read from the last event or the end of the answer; not before it is over."""
        if self._counts is None:
            self._counts = usage_in(self._usage)
        return self._counts

    @property
    def finish_reason(self) -> str | None:
        """Why generation ended, in the engine's word."""
        if self._reason:
            self._finish, self._reason = reason_in(self._reason), b""
        return self._finish

    def _begin(self, data: bytes, now: float) -> bytes:
        if self._pending:
            data, self._pending = self._pending + data, b""
        at = 0
        while self.head is None:  # interim 1xx answers leave it None
            end = data.find(b"\r\n\r\n", at, at + MAX_HEAD)
            if end < 0:
                self._pending = data = data[at:]
                if len(data) >= MAX_HEAD:
                    raise UpstreamBroke("framing", "the engine's response head is too long")
                return b""
            try:
                head = parse_head(data[at : end + 2])
            except FramingError as error:
                raise UpstreamBroke("framing", str(error)) from error
            at = end + 4
            if head.plain and head.length == len(data) - at and self.renamer is None:
                return self._whole(head, data[at:], now)
            self._open(head)
        if at:
            data = data[at:]
        if self.state is REFUSED:
            return self._collect(data)
        if self._too_early(data):
            self._pending = data
            return b""
        return self._commit(data, now)

    def _too_early(self, data: bytes) -> bool:
        """Whether the first bytes do not tell yet what the answer is."""
        if not data:
            return not self._body.ended
        return self._sse and isinstance(self._body, ChunkedBody) and undecided(data, self.patient)

    def _open(self, head: Head) -> None:
        if 100 <= head.status < 200:
            return
        self.head = head
        # What follows is needed by an answer that does not come whole in one read.
        self._done = self._torn = False
        self._said = self._guesses = 0
        self._carry: bytes = b""  # an unfinished event
        self._last: bytes = b""  # the newest payload, with the event it began in
        self._held: bytes = b""  # an unfinished size line, not shown yet
        self._finished: frozenset[int] = frozenset()  # indices of choices, where there are several
        self._like: Likeness | None = None  # how the events of a stream look that passes as it came
        self._rebuild: bool = self.http_1_0 or self.renamer is not None
        self._body = body_for(head)
        self._sse = head.is_sse
        if isinstance(self._body, RawBody) or (self._sse and not head.chunked):
            self._rebuild = True  # it must be able to take an error event
        if not self._rebuild and self.gaps is None:  # rebuilt, each event is made anew: what goes out is not what came
            self._guesses = GUESSES
        self.status, self.refused = head.status, not 200 <= head.status < 300
        self.state = REFUSED if self.refused else HELD

    def _collect(self, data: bytes) -> bytes:
        try:
            payload = self._body.feed(data)
        except FramingError as error:
            raise UpstreamBroke("framing", str(error)) from error
        self.refusal += payload[: max(0, ERROR_KEPT - len(self.refusal))]
        self._said += len(payload)
        if self._said > ERROR_MOST:
            raise UpstreamBroke("framing", "the engine's error body is too long")
        if self._body.ended:
            self.state = DONE
            if self._sse:
                self.refusal = error_said(self.refusal)
        return b""

    def _judge_error(self, data: bytes, error: re.Match[bytes]) -> bytes:
        """A stream that begins with an error: what is about the request is the client's to hear, as any 4xx."""
        status = clients_fault(data, error)
        if status is None:
            raise UpstreamBroke("engine_error", "the engine answered with an error event")
        self.refused, self.status, self.state = True, status, REFUSED
        return self._collect(data)

    def _commit(self, data: bytes, now: float) -> bytes:
        """The first body byte: from here the client sees this engine, unless these bytes break the answer."""
        assert self.head is not None
        if self._sse and (error := error_in(data, self.patient)) is not None:
            return self._judge_error(data, error)
        self.state = FLOWING
        if self._sse:
            self._reason_marker = reason_marker(data)
        self.first_byte_at = now
        on_first, self.on_first = self.on_first, None  # it has the request let go of, which a broken beginning needs
        head = self._opening()
        self.bytes_out += len(head)
        out = head + self.feed(data, now)
        if self._body.ended and not self._last:
            raise UpstreamBroke("no_answer", "the engine's answer is empty")
        self.committed, self.on_first = True, on_first
        if self.first_token_at is not None:
            self._first()
        return out

    def _whole(self, head: Head, payload: bytes, now: float) -> bytes:
        """A plain answer that came in one read: at once what is otherwise done step by step."""
        self.head, self._body = head, WHOLE
        self.state, self.committed = DONE, True
        self.first_byte_at = self.first_token_at = self.last_at = now
        self._usage = self._reason = payload
        on_first, self.on_first = self.on_first, None  # see _first
        if on_first is not None:
            on_first()
        out = b"".join((head.start, self.headers, _CLOSED if self.http_1_0 else head.sized, payload))
        self.bytes_out = len(out)
        return out

    def _opening(self) -> bytes:
        """What the client is told before the body."""
        assert self.head is not None
        chunked = self._rebuild or isinstance(self._body, ChunkedBody)
        framing = _CLOSED if self.http_1_0 else _CHUNKED if chunked else self.head.sized
        return self.head.start + self.headers + framing

    def _first(self) -> None:
        """Call on_first, once. It leads to the exchange, which leads back here: no reference cycle may be left."""
        on_first, self.on_first = self.on_first, None
        if on_first is not None:
            on_first()

    def _keep(self, payload: bytes, now: float) -> None:
        """A plain answer comes as one: its first byte is its first token. Its counts are looked for as it passes, since
        what clients may ask for besides (prompt_logprobs) can stand behind them."""
        if self.first_token_at is None:
            self.first_token_at = now
            self._first()
        window = self._last + payload if self._last else payload
        usage, reason = window.rfind(USAGE), window.rfind(REASON)
        if usage >= 0:
            self._usage = window[usage : usage + TAIL]
        if reason >= 0:
            self._reason = window[reason : reason + TAIL]
        self._last = window[-TAIL:]

    def _watch(self, payload: bytes, now: float) -> None:
        """Look at a payload in passing. An event cut by the network is seen whole when its rest arrives.

        By find(): `in` takes bytes for a number first, which makes and drops an exception each time.
        """
        window = self._carried(payload) if self._carry else payload
        self.events += window.count(_EVENT) + window.startswith(b"data:")
        if self.first_token_at is None and CONTENT.search(window):
            self.first_token_at = now
            self._first()
        if window.find(USAGE) >= 0:
            self._usage = window
        if window.find(self._reason_marker) >= 0:
            self._reason = window
            if self.choices > 1:
                self._finished |= finished_choices(window)
        if window.find(_ERROR) >= 0 and ERROR_EVENT.search(window):
            self.failed_in_stream = True
        if not self._done:  # whatever follows the last event is not an answer's business
            self._last = window
            if window.find(LAST_WORD) >= 0 and told_all(window):
                self._done, self._like, self._guesses = True, None, 0
        if not window.endswith(ENDS):
            self._carry = window[last_end(window) :][-CARRY_LIMIT:]

    def _pass(self, like: Likeness, data: bytes, now: float) -> None:
        """One more event of that look: what was found in the first is taken as found again."""
        self.last_at = now
        self.events += 1
        self.bytes_out += len(data)
        self._last = like.event
        if like.counts:
            self._usage = like.event

    def _guess(self, data: bytes, payload: bytes) -> None:
        """A token was looked at: the next ones may look the same."""
        self._guesses -= 1
        self._like = likeness(self._body, data, payload) or self._like

    def _carried(self, payload: bytes) -> bytes:
        """The payload behind the unfinished event that it goes on with, which was counted when it began."""
        carry, self._carry = self._carry, b""
        self.events -= carry.count(_EVENT) + carry.startswith(b"data:")
        return carry + payload

    def _hold_back(self, data: bytes) -> bytes:
        """An unfinished size line waits: it may be the last one, which a stream without [DONE] must not show."""
        data, self._held = self._held + data, self._body.partial
        return data[: len(data) - len(self._held)]

    def _rebuilt(self, payload: bytes) -> bytes:
        assert self.head is not None
        if self.renamer is not None:
            payload = self.renamer.feed(payload, sse=self.head.is_sse, ended=self._body.ended)
        if self.http_1_0:
            return payload
        return chunk(payload) + (LAST_CHUNK if self._body.ended else b"")

    def _closing(self) -> bytes | None:
        """What is missing at the end of a stream without [DONE]; None unless every choice has its finish reason."""
        if self._carry or self.failed_in_stream:
            return None
        finished = self._finished or finished_choices(self._reason)
        return b"data: [DONE]\n\n" if len(finished) >= self.choices else None

    def _end(self, out: bytes) -> bytes:
        """The end of the body. A stream that is not whole would pass for whole in every SDK: it ends with an error."""
        self.state = DONE
        assert self.head is not None
        if not self._rebuild and self._body.surplus:
            out = out[: -self._body.surplus]
        if not self._rebuild and self._body.trailers:
            out = out[: self._body.last_chunk] + LAST_CHUNK  # headers come from our list alone
        if not self._sse or self._done or self._last.rstrip().endswith(LAST_WORD):
            return out
        event = self._closing()
        if event is None:
            self.failed_in_stream = True
            event = b"\n\n" if self._carry else b""  # it ended inside an event
            event += event_of(Failure.UPSTREAM_FAILED, "the engine ended its stream early")
        if self.http_1_0:
            return out + event
        kept = out[: -len(LAST_CHUNK)] if self._rebuild else out[: self._body.last_chunk]
        return kept + chunk(event) + LAST_CHUNK
