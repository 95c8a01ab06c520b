"""Relays one HTTP response: takes bytes from the engine, returns bytes for the client. No I/O.

The gateway's response head replaces the engine's. It is held back until the first byte of the body,
because until then a failed request can be retried elsewhere. The body is forwarded as received,
with its chunk framing. It is only scanned for the first token, events, token counts, finish reasons
and a proper end.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from gateway.metrics.metric_types import Histogram
from gateway.protocol.byte_scan import count_events
from gateway.protocol.message_bytes import whole_response
from gateway.protocol.response.client_framing import CONNECTION_CLOSE
from gateway.protocol.response.held_answer import HeldAnswer, check_json
from gateway.protocol.response.http_response_parser import (
    COMPLETE,
    NOT_STARTED,
    ChunkedBody,
    FramingError,
    RawBody,
    ResponseHead,
    ResponseHeadReader,
)
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.relay_state import BEHIND, DONE, FLOWING, HEAD, HELD, REFUSED
from gateway.protocol.response.retryable_start import HeldChunks, PartialHead, RetryableStart
from gateway.protocol.response.stepwise_output import STEP_BYTES
from gateway.protocol.response.stream_end import StreamEnd
from gateway.protocol.response.usage_and_error_search import (
    MAX_REFUSAL_BYTES,
    client_error_status,
    error_text,
    find_error_body,
    find_leading_error,
    finish_reason_marker,
    is_flat_error,
)
from gateway.protocol.response.whole_answer_to_stream import EventWriter, as_stream
from gateway.protocol.translate.translator import AnswerTranslator
from gateway.protocol.upstream_error import UpstreamError as UpstreamError

MAX_ERROR_BYTES = 64 * 1024 * 1024  # bytes of an error body; engines repeat a bad request in it

_heads = ResponseHeadReader()  # one for all relays: engines of a kind send equal heads
read_head, read_whole = _heads.read, _heads.read_whole


class Relay(StreamEnd):
    """Relays one response: pass the engine's bytes to feed(), and send the result to the client.

    Set by the caller:

    own_headers       the gateway's header fields, each ending in CRLF, without framing
    on_first_token    called once, at the first generated token
    is_http_1_0       whether the client cannot read chunks; the end of its connection ends the body
    hold_until_token  whether a stream is held back until its first token, not its first event
    chunk_gaps        histogram of the times between chunks in seconds, or None
    rewriter          replaces the engine's model name by the client's; None if they are equal
    translator        translates the payload to the client's API; None if the engine has that API
    choice_count      number of choices that the client requested; each ends with a finish reason
    event_writer      turns a whole answer into the events of a stream; None if none is requested
    asked_at          monotonic time at which the client requested the stream, or None

    Results, with times as given to feed() or None:

    is_committed     whether bytes of the body were returned for the client: no retry is possible
    has_error_event  whether the stream ended with an error event, of the engine or of the gateway
    is_converted     whether the engine sent a whole answer in place of a stream
    is_refused       whether the engine's `status` is not 2xx, or the stream began with an error
                     that the request caused
    """

    __slots__ = (
        *("_event_chunks", "_has_named_events", "_held_start", "_partial_head", "_refusal"),
        *("_refusal_bytes", "_unprocessed", "asked_at", "chunk_gaps", "event_writer"),
        *("first_byte_at", "hold_until_token", "is_committed", "is_converted", "is_refused"),
        *("last_data_at", "refusal_body", "status"),
    )

    def __init__(
        self,
        own_headers: bytes,
        on_first_token: Callable[[], None] | None = None,
        is_http_1_0: bool = False,
        rewriter: ModelNameRewriter | None = None,
        hold_until_token: bool = False,
        chunk_gaps: Histogram | None = None,
        choice_count: int = 1,
        translator: AnswerTranslator | None = None,
    ) -> None:
        self._init_scan(on_first_token, choice_count)
        self.own_headers = own_headers
        self.is_http_1_0 = is_http_1_0
        self.rewriter = rewriter
        self.translator = translator
        self.state = HEAD
        self.head = None
        self._body = NOT_STARTED
        self.hold_until_token = hold_until_token
        self.chunk_gaps = chunk_gaps
        self._has_named_events = False
        self.event_writer: EventWriter | None = None
        self.is_committed = self.is_converted = self.is_refused = False
        self.bytes_sent = self.status = 0
        self.asked_at: float | None = None
        self.first_byte_at: float | None = None
        self.last_data_at: float | None = None
        self.refusal_body = b""
        self._partial_head: PartialHead | None = None
        # Held back from the client: events that may still be an error, or a part of a JSON answer.
        self._held_start: RetryableStart | HeldAnswer | None = None

    @property
    def is_untouched(self) -> bool:
        """Return whether the engine has not sent any byte of its response."""
        return self.head is None and self._partial_head is None

    @property
    def has_held_payload(self) -> bool:
        """Return whether part of a JSON answer has arrived that the client has not received."""
        held = self._held_start
        return isinstance(held, HeldAnswer) and bool(held.payload)

    @property
    def is_connection_reusable(self) -> bool:
        """Return whether the engine's connection can carry another request after this response."""
        body, head = self._body, self.head
        return head is not None and head.keep_alive and body.is_complete and not body.surplus_bytes

    def feed(self, data: bytes, now: float) -> bytes:
        """Process bytes from the engine, and return bytes for the client.

        If the bytes cause more work than may be done at once, `state` becomes BEHIND. Then pass b""
        in a later iteration of the event loop, to process more of them. Further bytes may be passed
        at any time; the relay then finishes the earlier work first. `now` is in monotonic seconds.

        Raises UpstreamError if the response is malformed or broken.
        """
        if self.state is not FLOWING:
            return self._begin(data, now)
        if self.chunk_gaps is not None and self.first_token_at is not None:
            # The first token came with data, so the time of that data is known.
            self.chunk_gaps.observe(now - self.last_data_at)  # type: ignore[operator]
        self.last_data_at = now
        chunks: ChunkedBody | None = self._event_chunks
        # In the ordinary case, neither the framing nor what is held back changes.
        if chunks is not None and self._scan_whole_chunks(chunks, data, now):
            self.bytes_sent += len(data)
            return data
        body = self._body
        try:
            payload = body.feed(data)
        except FramingError as error:
            # The valid chunks before the error were tracked but not forwarded.
            self._is_torn = not self._must_reframe and not body.was_at_boundary
            raise UpstreamError("framing", str(error)) from error
        if self._is_sse:
            if payload:
                self._scan_events(payload, now)
        elif payload:
            self._scan_plain(payload, now)
        if self._must_reframe:
            data = self._reframe(payload)
        elif self._held_size_line or body.partial:
            data = self._hold_size_line(data)
        if body.is_complete and self.state is FLOWING:
            data = self._finish_body(data)
        self.bytes_sent += len(data)
        return data

    def _note_error_event(self, event: re.Match[bytes]) -> None:
        if is_flat_error(event):  # nothing of this read is forwarded
            is_whole = self._must_reframe or self._body.was_at_boundary
            self._is_torn = not (is_whole and self._last_payload.endswith(b"\n"))
            self._body = ChunkedBody()  # this read may contain the body's end, or a part of a chunk
            raise UpstreamError("engine_error", "the engine sent an error event")
        super()._note_error_event(event)

    def _scan_whole_chunks(self, chunks: ChunkedBody, data: bytes, now: float) -> bool:
        # Scan `data` if it consists of whole chunks, in the usual form; return whether it does.
        if (
            self.first_token_at is not None
            and chunks.expects_size
            and not (self._partial_event or self._has_named_events)
            and (count := count_events(data, self._reason_marker))
        ):
            self.event_count += count
            self._last_payload = data
            return True
        payload = chunks.match_whole_chunk(data)
        if payload:
            self._scan_events(payload, now)
        return bool(payload)

    def eof(self) -> bytes:
        """Handle the end of the engine's connection, and return the last bytes for the client.

        Raises UpstreamError if the response is incomplete.
        """
        if self.head is None or not isinstance(self._body, RawBody):
            if self.lacks_only_its_end:
                self.state = DONE
                return self._frame_end(b"")
            kind = "truncated" if self.head else "no_answer"
            raise UpstreamError(kind, "the engine closed the connection before its response ended")
        earlier = b""
        if self.state is HELD:
            held = self._held_start
            if not (isinstance(held, HeldAnswer) and held.payload):
                message = "the engine closed the connection before its response began"
                raise UpstreamError("truncated", message)
            earlier = self._commit_answer(held, self.last_data_at or 0.0)
        earlier += self._catch_up(self.last_data_at or 0.0)
        if self.is_converted:
            return earlier
        self._body.is_complete = True
        if self.state is REFUSED:
            return self._collect_refusal(b"")
        out = self._reframe(b"")
        if self.state is FLOWING:
            out = self._finish_body(out)
        self.bytes_sent += len(out)
        return earlier + out + self._catch_up(self.last_data_at or 0.0)

    def _begin(self, data: bytes, now: float) -> bytes:
        is_start = self.head is None and self._partial_head is None
        is_copied = self.rewriter is None and self.translator is None and self.event_writer is None
        if is_start and is_copied:
            whole = read_whole(data)  # usually, an answer that is not streamed arrives in one read
            if whole is not None:
                head, payload = whole
                if find_error_body(payload) is None:
                    return self._relay_whole(head, payload, now)
        return self._read_start(data, now, is_copied)

    def _read_start(self, data: bytes, now: float, is_copied: bool) -> bytes:
        # Process the head and the first bytes of the body, whatever their form.
        #
        # `is_copied` if the payload of a whole answer is forwarded as it is.
        if self._held_start is not None:
            return self._hold_or_commit(self._held_start, data, now)
        if self._partial_head is not None:
            data = self._partial_head.add(data)
            if not data:
                return b""
            self._partial_head = None
        offset = 0
        while self.head is None:  # interim 1xx responses leave it None
            try:
                read = read_head(data, offset)
            except FramingError as error:
                raise UpstreamError("framing", str(error)) from error
            if read is None:
                if offset < len(data):
                    self._partial_head = PartialHead(data[offset:])
                return b""
            head, offset = read
            if (
                is_copied
                and head.is_plain
                and head.length == len(data) - offset
                and find_error_body(data, offset) is None
            ):
                return self._relay_whole(head, data[offset:], now)
            self._set_head(head)
        if offset:
            data = data[offset:]
        return self._begin_body(self.head, data, now)

    def _begin_body(self, head: ResponseHead, data: bytes, now: float) -> bytes:
        if self.state is REFUSED:
            return self._collect_refusal(data)
        if self.state is BEHIND:
            return self._continue(data, now)
        if head.is_json:
            answer = HeldAnswer(head, may_begin_blank=self.event_writer is not None)
            return self._hold_or_commit(answer, data, now)
        if not (data or self._body.is_complete):
            return b""
        if data and self._is_sse and isinstance(self._body, ChunkedBody):
            return self._hold_or_commit(self._new_held_start(), data, now)
        return self._commit(data, now)

    def _hold_or_commit(self, held: RetryableStart | HeldAnswer, data: bytes, now: float) -> bytes:
        if held.is_undecided(data) and not held.is_overdue(now, self.asked_at):
            self._held_start, self.last_data_at = held, now
            return b""
        if isinstance(held, HeldAnswer) and held.is_complete:
            return self._commit_answer(held, now)
        self._held_start = None
        return self._commit(bytes(held.data), now)

    def _commit_answer(self, held: HeldAnswer, now: float) -> bytes:
        # Forward a whole JSON answer, as the events of a stream if the client asked for one.
        self._held_start, data = None, bytes(held.data)
        if held.payload:
            check_json(held.payload)
        if self.event_writer is not None and find_error_body(data) is None:
            stream = as_stream(held, self.event_writer)
            if stream is not None:
                self.is_converted = True
                head, data = stream
                self._set_head(head)
        # Events may lack token counts, and the scan of pieces finds no reason with blanks.
        self._usage_payload = self._finish_payload = bytes(held.payload)
        return self._commit(data, now)

    # These methods depend on the stream's event format. named_event_relay.py overrides them.
    def _new_held_start(self) -> RetryableStart:
        return HeldChunks(self.hold_until_token)

    def _find_leading_error(self, data: bytes) -> re.Match[bytes] | None:
        return find_leading_error(data, self.hold_until_token)

    def _leading_error_status(self, data: bytes, error: re.Match[bytes]) -> int | None:
        return client_error_status(data, error)

    def _refusal_text(self) -> bytes:
        return error_text(self.refusal_body)

    def _set_head(self, head: ResponseHead) -> None:
        if 100 <= head.status < 200:
            return
        self.head = head
        if head.is_html:
            raise UpstreamError(
                "web_page",
                "the engine answered with a web page (text/html) and not with an API response",
            )
        self._begin_output(head)
        self._unprocessed: deque[bytes] | None = None  # pieces of a long held start, in BEHIND
        self._refusal, self._refusal_bytes = bytearray(), 0
        if not self._is_sse:
            self.chunk_gaps = None
        # The body of an event stream whose chunks are forwarded as they are, else None.
        self._event_chunks: ChunkedBody | None = None
        if self._is_sse and not self._must_reframe and isinstance(self._body, ChunkedBody):
            self._event_chunks = self._body
        self.status, self.is_refused = head.status, not 200 <= head.status < 300
        self.state = REFUSED if self.is_refused else HELD

    def _collect_refusal(self, data: bytes) -> bytes:
        try:
            payload = self._body.feed(data)
        except FramingError as error:
            raise UpstreamError("framing", str(error)) from error
        self._refusal += payload[: max(0, MAX_REFUSAL_BYTES - len(self._refusal))]
        self._refusal_bytes += len(payload)
        if self._refusal_bytes > MAX_ERROR_BYTES:
            message = f"the engine's error body is longer than {MAX_ERROR_BYTES} bytes"
            raise UpstreamError("framing", message)
        if self._body.is_complete:
            self.state = DONE
            self.refusal_body = bytes(self._refusal)
            if self._is_sse:
                self.refusal_body = self._refusal_text()
        return b""

    def _handle_leading_error(self, data: bytes, error: re.Match[bytes]) -> bytes:
        # Treat an error at the start of a stream, or of a body, as an error response.
        #
        # Raises UpstreamError if the request did not cause the error.
        find_status = self._leading_error_status if self._is_sse else client_error_status
        if (status := find_status(data, error)) is None:
            raise UpstreamError("engine_error", "the engine sent an error event or body")
        self.is_refused, self.status, self.state = True, status, REFUSED
        return self._collect_refusal(data)

    def _commit(self, data: bytes, now: float) -> bytes:
        # Start to forward the body, unless its first bytes show an error.
        assert self.head is not None
        error = self._find_leading_error(data) if self._is_sse else find_error_body(data)
        if error is not None:
            return self._handle_leading_error(data, error)
        self.state = FLOWING
        if self._is_sse:
            self._reason_marker = finish_reason_marker(data)
        self.first_byte_at = now
        # Called last: it releases the request, which a retry needs if feed() raises.
        on_first, self.on_first_token = self.on_first_token, None
        head = self._client_head()
        self.bytes_sent += len(head)
        first = data if len(data) <= STEP_BYTES else data[:STEP_BYTES]
        out = head + self.feed(first, now)
        if self._body.is_complete and not self._last_payload:
            raise UpstreamError("no_answer", "the body of the engine's response is empty")
        self.is_committed, self.on_first_token = True, on_first
        if self.first_token_at is not None:
            self._notify_first_token()
        if first is not data:
            steps = range(STEP_BYTES, len(data), STEP_BYTES)
            self._unprocessed = deque(data[at : at + STEP_BYTES] for at in steps)
            self._note_progress()
        return out

    def _continue(self, data: bytes, now: float) -> bytes:
        if not data:
            return self._process_step(now)
        out = self._catch_up(now)
        if self.state is FLOWING:
            return out + self.feed(data, now)
        self._body.surplus_bytes += len(data)
        return out

    def _process_step(self, now: float) -> bytes:
        # Process more of what was received earlier: the rest of a translation, or of a held start.
        translator = self.translator
        self.state = FLOWING
        if translator is not None and translator.is_behind:
            payload = translator.more()
            is_last = not translator.is_behind
            out = self._frame(payload, is_last=is_last)
            if is_last and self._body.is_complete:
                out = self._finish_body(out)
            self.bytes_sent += len(out)
        else:
            out = self.feed(self._unprocessed.popleft(), now) if self._unprocessed else b""
        self._note_progress()
        return out

    def _note_progress(self) -> None:
        # Enter the state BEHIND if there is more to process.
        if self._unprocessed and self.state is DONE:
            self._body.surplus_bytes += sum(map(len, self._unprocessed))
            self._unprocessed.clear()
        elif self.state is FLOWING and (
            self._unprocessed or (self.translator is not None and self.translator.is_behind)
        ):
            self.state = BEHIND

    def _catch_up(self, now: float) -> bytes:
        # Process all that was received earlier, in one step.
        out = []
        while self.state is BEHIND:
            out.append(self._process_step(now))
        return b"".join(out)

    def _relay_whole(self, head: ResponseHead, payload: bytes, now: float) -> bytes:
        # Relay a response that is not streamed and has arrived as a whole in one read.
        self.head, self._body = head, COMPLETE
        if head.is_json:
            check_json(payload)
        self.state, self.is_committed = DONE, True
        self.first_byte_at = self.first_token_at = self.last_data_at = now
        self._usage_payload = self._finish_payload = payload
        on_first, self.on_first_token = self.on_first_token, None  # see _notify_first_token()
        if on_first is not None:
            on_first()
        # The head may have the length of an earlier response.
        if self.is_http_1_0:
            out = b"".join((head.head_start, self.own_headers, CONNECTION_CLOSE, payload))
        else:
            out = whole_response(head.head_start, self.own_headers, payload)
        self.bytes_sent = len(out)
        return out
