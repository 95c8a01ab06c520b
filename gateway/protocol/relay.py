"""Relays one response: bytes from the engine in, bytes for the client out. Sans-IO.

The engine's head is replaced by the gateway's and held until the first body byte, so that anything
before that can still be retried elsewhere. The body is forwarded as received, chunk framing
included, and only scanned: for the first token, events, usage, finish reasons and a proper end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from gateway.metrics.metric_types import Histogram
from gateway.protocol.errors import Failure, event_of
from gateway.protocol.response_framing import (
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
from gateway.protocol.rewrite import Renamer
from gateway.protocol.stream_scan import (
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
from gateway.protocol.upstream_error import STOPPED as STOPPED
from gateway.protocol.upstream_error import UpstreamBroke as UpstreamBroke

ERROR_MOST = 64 * 1024 * 1024  # bytes of an error body; engines repeat a bad request in it
CARRY_LIMIT = 64 * 1024  # bytes of a partial event that are kept for scanning
TAIL = 16 * 1024  # bytes of a plain response that are kept for scanning

_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_CLOSED = b"connection: close\r\n\r\n"
_EVENT, _ERROR = b"\ndata:", b'"error"'


class State(Enum):
    """State of a relay. In HEAD and HELD a retry elsewhere is possible; in FLOWING it is not."""

    HEAD = auto()
    REFUSED = auto()
    HELD = auto()
    FLOWING = auto()
    DONE = auto()


# Module-level names, because looking up an Enum member on its class is ten times slower.
HEAD, REFUSED, HELD, FLOWING, DONE = State


class Relay:
    """One response in transit: feed() engine bytes, send what it returns, until `state` is DONE.

    Set by the caller:
    own_headers       the gateway's header fields, each ending in CRLF, without framing
    on_first_token    called once, at the first generated token
    is_http_1_0       the client cannot read chunks: it gets the bare body, then a close
    hold_until_token  hold a stream back until its first token; engines send a role before it
    chunk_gaps        histogram of the times between chunks, or None
    rewriter          replaces the engine's model name by the client's, or None if they are equal
    choice_count      choices the client asked for, each of which ends with a finish reason

    Results, with times as given to feed() or None:
    is_committed      body bytes have been returned for the client, so nothing can be retried
    has_error_event   the stream ended with an error event, of the engine or of the gateway
    is_refused        the engine's `status` is not 2xx, or the stream began with a client error
    """

    __slots__ = (
        "_body",
        "_carry",
        "_counts",
        "_done",
        "_finish",
        "_finished",
        "_held",
        "_last",
        "_pending",
        "_reason",
        "_reason_marker",
        "_rebuild",
        "_refusal_bytes",
        "_sse",
        "_torn",
        "_usage",
        "bytes_out",
        "choices",
        "committed",
        "events",
        "failed_in_stream",
        "first_byte_at",
        "first_token_at",
        "gaps",
        "head",
        "headers",
        "http_1_0",
        "last_at",
        "on_first",
        "patient",
        "refusal",
        "refused",
        "renamer",
        "state",
        "status",
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
        self._pending = b""  # a partial head or a first event that is not yet decided
        self._usage = b""  # the newest payload with token counts
        self._reason = b""  # the newest payload with a finish reason, until that is parsed
        self._counts: Usage | None = None
        self._finish: str | None = None

    @property
    def untouched(self) -> bool:
        """Whether the engine has not sent a single byte of a response."""
        return self.head is None and not self._pending

    @property
    def reusable(self) -> bool:
        """Whether the engine's connection can carry another request."""
        body, head = self._body, self.head
        return head is not None and head.keep_alive and body.ended and not body.surplus

    def feed(self, data: bytes, now: float) -> bytes:
        """Process bytes from the engine and return bytes for the client.

        Raises UpstreamError when the response is malformed or broken.
        """
        if self.state is not FLOWING:
            return self._begin(data, now)
        if self.gaps is not None and self._sse and self.first_token_at is not None:
            self.gaps.observe(now - (self.last_at or now))
        self.last_at = now
        body = self._body
        try:
            payload = body.feed(data)
        except FramingError as error:
            # The valid chunks before the error were tracked but not forwarded.
            self._torn = not self._rebuild and not body.rested
            raise UpstreamBroke("framing", str(error)) from error
        if self._sse:
            if payload:
                self._scan_events(payload, now)
        elif payload:
            self._scan_plain(payload, now)
        if self._rebuild:
            data = self._reframe(payload)
        elif self._held or body.partial:
            data = self._hold_size_line(data)
        if body.ended:
            data = self._end(data)
        self.bytes_out += len(data)
        return data

    def eof(self) -> bytes:
        """Handle the engine's close and return the last bytes for the client.

        Raises UpstreamError if the response is incomplete.
        """
        if self.head is None or not isinstance(self._body, RawBody):
            kind = "truncated" if self.head else "no_answer"
            raise UpstreamBroke(kind, "the engine closed before its response ended")
        if self.state is HELD:
            raise UpstreamBroke("truncated", "the engine closed before its response began")
        self._body.ended = True
        if self.state is REFUSED:
            return self._collect_refusal(b"")
        out = self._end(self._reframe(b""))
        self.bytes_out += len(out)
        return out

    @property
    def at_seam(self) -> bool:
        """Whether an SSE event of the gateway could follow what the client has received."""
        if (
            not self._sse
            or self._body.ended
            or self._torn
            or not (self._rebuild or self._body.between)
        ):
            return False
        return not self._carry or (self.renamer is not None and not self.renamer.mid_event)

    def break_off(self, failure: Failure, message: str) -> bytes:
        """Return the bytes that tell a committed client that the stream fails, if possible.

        Within a chunk or an event nothing can be added; closing the connection has to do.
        """
        if not self.at_seam:
            return b""
        event = b"" if self._told_all else event_of(failure, message)
        return event if self.http_1_0 else chunk(event) + LAST_CHUNK

    @property
    def _told_all(self) -> bool:
        """Whether the client has received [DONE], after which nothing may follow."""
        return self._done

    @property
    def usage(self) -> Usage:
        """Token counts, parsed on first access; only valid once the response is complete."""
        if self._counts is None:
            self._counts = usage_in(self._usage)
        return self._counts

    @property
    def finish_reason(self) -> str | None:
        """Why generation ended, as the engine reports it; None if it did not."""
        if self._reason:
            self._finish, self._reason = reason_in(self._reason), b""
        return self._finish

    def _begin(self, data: bytes, now: float) -> bytes:
        if self._pending:
            data, self._pending = self._pending + data, b""
        offset = 0
        while self.head is None:  # interim 1xx responses leave it None
            end = data.find(b"\r\n\r\n", offset, offset + MAX_HEAD)
            if end < 0:
                self._pending = data = data[offset:]
                if len(data) >= MAX_HEAD:
                    raise UpstreamBroke("framing", "the engine's response head is too long")
                return b""
            try:
                head = parse_head(data[offset : end + 2])
            except FramingError as error:
                raise UpstreamBroke("framing", str(error)) from error
            offset = end + 4
            if head.plain and head.length == len(data) - offset and self.renamer is None:
                return self._relay_whole(head, data[offset:], now)
            self._set_head(head)
        if offset:
            data = data[offset:]
        if self.state is REFUSED:
            return self._collect_refusal(data)
        if self._is_undecided(data):
            self._pending = data
            return b""
        return self._commit(data, now)

    def _is_undecided(self, data: bytes) -> bool:
        """Whether the first bytes do not show yet what kind of response this is."""
        if not data:
            return not self._body.ended
        return self._sse and isinstance(self._body, ChunkedBody) and undecided(data, self.patient)

    def _set_head(self, head: Head) -> None:
        if 100 <= head.status < 200:
            return
        self.head = head
        # Only a response that does not arrive whole in one read needs these fields.
        self._done = self._torn = False
        self._refusal_bytes = 0
        self._carry: bytes = b""  # the partial event at the end of the last payload
        self._last: bytes = b""  # the newest payload, including the event it began in
        self._held: bytes = b""  # a partial chunk size line that has not been forwarded yet
        self._finished: frozenset[int] = frozenset()  # indices of finished choices if several
        self._rebuild: bool = self.http_1_0 or self.renamer is not None
        self._body = body_for(head)
        self._sse = head.is_sse
        if isinstance(self._body, RawBody) or (self._sse and not head.chunked):
            self._rebuild = True  # otherwise an error event could not be added
        self.status, self.refused = head.status, not 200 <= head.status < 300
        self.state = REFUSED if self.refused else HELD

    def _collect_refusal(self, data: bytes) -> bytes:
        try:
            payload = self._body.feed(data)
        except FramingError as error:
            raise UpstreamBroke("framing", str(error)) from error
        self.refusal += payload[: max(0, ERROR_KEPT - len(self.refusal))]
        self._refusal_bytes += len(payload)
        if self._refusal_bytes > ERROR_MOST:
            raise UpstreamBroke("framing", "the engine's error body is too long")
        if self._body.ended:
            self.state = DONE
            if self._sse:
                self.refusal = error_said(self.refusal)
        return b""

    def _handle_leading_error(self, data: bytes, error: re.Match[bytes]) -> bytes:
        """Turn a leading error event about the request into a refusal; raise for any other."""
        status = clients_fault(data, error)
        if status is None:
            raise UpstreamBroke("engine_error", "the engine sent an error event")
        self.refused, self.status, self.state = True, status, REFUSED
        return self._collect_refusal(data)

    def _commit(self, data: bytes, now: float) -> bytes:
        """Start forwarding the body, unless its first bytes break the response."""
        assert self.head is not None
        if self._sse and (error := error_in(data, self.patient)) is not None:
            return self._handle_leading_error(data, error)
        self.state = FLOWING
        if self._sse:
            self._reason_marker = reason_marker(data)
        self.first_byte_at = now
        # Deferred: the callback releases the request, which a retry needs if feed() raises.
        on_first, self.on_first = self.on_first, None
        head = self._opening()
        self.bytes_out += len(head)
        out = head + self.feed(data, now)
        if self._body.ended and not self._last:
            raise UpstreamBroke("no_answer", "the engine's response is empty")
        self.committed, self.on_first = True, on_first
        if self.first_token_at is not None:
            self._notify_first_token()
        return out

    def _relay_whole(self, head: Head, payload: bytes, now: float) -> bytes:
        """Relay a plain response that arrived in one read, without the intermediate states."""
        self.head, self._body = head, WHOLE
        self.state, self.committed = DONE, True
        self.first_byte_at = self.first_token_at = self.last_at = now
        self._usage = self._reason = payload
        on_first, self.on_first = self.on_first, None  # see _notify_first_token()
        if on_first is not None:
            on_first()
        out = b"".join(
            (head.start, self.headers, _CLOSED if self.http_1_0 else head.sized, payload)
        )
        self.bytes_out = len(out)
        return out

    def _opening(self) -> bytes:
        """Return the head for the client."""
        assert self.head is not None
        chunked = self._rebuild or isinstance(self._body, ChunkedBody)
        framing = _CLOSED if self.http_1_0 else _CHUNKED if chunked else self.head.sized
        return self.head.start + self.headers + framing

    def _notify_first_token(self) -> None:
        """Call on_first_token once, then drop it, because it would form a reference cycle."""
        on_first, self.on_first = self.on_first, None
        if on_first is not None:
            on_first()

    def _scan_plain(self, payload: bytes, now: float) -> None:
        """Scan part of a plain response, whose first byte counts as its first token.

        Scanned throughout, since optional members such as prompt_logprobs can follow `usage`.
        """
        if self.first_token_at is None:
            self.first_token_at = now
            self._notify_first_token()
        window = self._last + payload if self._last else payload
        usage, reason = window.rfind(USAGE), window.rfind(REASON)
        if usage >= 0:
            self._usage = window[usage : usage + TAIL]
        if reason >= 0:
            self._reason = window[reason : reason + TAIL]
        self._last = window[-TAIL:]

    def _scan_events(self, payload: bytes, now: float) -> None:
        """Scan a payload of a stream, together with the partial event that it continues.

        Uses find() because `in` first tries bytes as an int, at the cost of an exception.
        """
        window = self._resume_event(payload) if self._carry else payload
        self.events += window.count(_EVENT) + window.startswith(b"data:")
        if self.first_token_at is None and CONTENT.search(window):
            self.first_token_at = now
            self._notify_first_token()
        if window.find(USAGE) >= 0:
            self._usage = window
        if window.find(self._reason_marker) >= 0:
            self._reason = window
            if self.choices > 1:
                self._finished |= finished_choices(window)
        if window.find(_ERROR) >= 0 and ERROR_EVENT.search(window):
            self.failed_in_stream = True
        if not self._done:  # anything after [DONE] is not part of the response
            self._last = window
            if window.find(LAST_WORD) >= 0 and told_all(window):
                self._done = True
        if not window.endswith(ENDS):
            self._carry = window[last_end(window) :][-CARRY_LIMIT:]

    def _resume_event(self, payload: bytes) -> bytes:
        """Prepend the partial event, which was counted when its beginning was scanned."""
        carry, self._carry = self._carry, b""
        self.events -= carry.count(_EVENT) + carry.startswith(b"data:")
        return carry + payload

    def _hold_size_line(self, data: bytes) -> bytes:
        """Hold a partial size line back: it may be the last chunk's, before which [DONE] may go."""
        data, self._held = self._held + data, self._body.partial
        return data[: len(data) - len(self._held)]

    def _reframe(self, payload: bytes) -> bytes:
        assert self.head is not None
        if self.renamer is not None:
            payload = self.renamer.feed(payload, sse=self.head.is_sse, ended=self._body.ended)
        if self.http_1_0:
            return payload
        return chunk(payload) + (LAST_CHUNK if self._body.ended else b"")

    def _closing(self) -> bytes | None:
        """Return the [DONE] event that the engine omitted; None if the stream is incomplete."""
        if self._carry or self.failed_in_stream:
            return None
        finished = self._finished or finished_choices(self._reason)
        return b"data: [DONE]\n\n" if len(finished) >= self.choices else None

    def _end(self, out: bytes) -> bytes:
        """Finish the body; an incomplete stream ends with an error event.

        SDKs would take a stream that just ends for complete.
        """
        self.state = DONE
        assert self.head is not None
        if not self._rebuild and self._body.surplus:
            out = out[: -self._body.surplus]
        if not self._rebuild and self._body.trailers:
            # Trailers are dropped: only the gateway's own header fields reach the client.
            out = out[: self._body.last_chunk] + LAST_CHUNK
        if not self._sse or self._done or self._last.rstrip().endswith(LAST_WORD):
            return out
        event = self._closing()
        if event is None:
            self.failed_in_stream = True
            event = b"\n\n" if self._carry else b""  # complete the partial event
            event += event_of(Failure.UPSTREAM_FAILED, "the engine ended its stream early")
        if self.http_1_0:
            return out + event
        body = out[: -len(LAST_CHUNK)] if self._rebuild else out[: self._body.last_chunk]
        return body + chunk(event) + LAST_CHUNK
