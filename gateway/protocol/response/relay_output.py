"""Frames what a relay sends to the client: the response head, chunks, and a stream's last events.

The payload is rewritten first if the model name must change, and translated if the client speaks
another API than the engine. No I/O.
"""

from __future__ import annotations

from gateway.protocol.errors import Failure, error_event
from gateway.protocol.response.held_answer import check_end
from gateway.protocol.response.http_framing import (
    LAST_CHUNK,
    ChunkedBody,
    RawBody,
    ResponseBody,
    ResponseHead,
    encode_chunk,
    new_body,
)
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.payload_scan import PayloadScan
from gateway.protocol.response.relay_state import BEHIND, DONE, FLOWING, RelayState
from gateway.protocol.response.usage_and_error_search import DONE_MARKER, find_finished_choices
from gateway.protocol.translate.translator import AnswerTranslator

CONNECTION_CLOSE = b"connection: close\r\n\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class RelayOutput(PayloadScan):
    """The client's side of one relayed response. The subclass `Relay` has the engine's side."""

    __slots__ = (
        *("_body", "_held_size_line", "_is_torn", "_must_reframe", "bytes_sent", "head"),
        *("is_http_1_0", "own_headers", "rewriter", "state", "translator"),
    )

    # `Relay` sets these attributes. A constructor of this class would be one more call per request.
    own_headers: bytes
    is_http_1_0: bool
    rewriter: ModelNameRewriter | None
    translator: AnswerTranslator | None
    bytes_sent: int
    state: RelayState
    head: ResponseHead | None
    _body: ResponseBody

    def _begin_output(self, head: ResponseHead) -> None:
        # The fields below are needed only if the response arrives in more than one read.
        self._begin_scan(head.is_sse)
        self._is_torn = False
        # A partial chunk size line that has not been forwarded yet.
        self._held_size_line: bytes = b""
        self._must_reframe: bool = (
            self.is_http_1_0 or self.rewriter is not None or self.translator is not None
        )
        self._body = new_body(head)
        if isinstance(self._body, RawBody) or (self._is_sse and not head.is_chunked):
            self._must_reframe = True  # without chunks, no error event could be added

    @property
    def is_at_boundary(self) -> bool:
        """Return whether an event may follow the bytes that the client has received so far."""
        if (
            not self._is_sse
            or self._body.is_complete
            or self._is_torn
            or not (self._must_reframe or self._body.at_chunk_boundary)
        ):
            return False
        if not self._partial_event or self.translator is not None:
            return True
        return self.rewriter is not None and not self.rewriter.is_mid_event

    @property
    def _is_done_sent(self) -> bool:
        # After the event [DONE] nothing may follow.
        return self._has_done_marker

    @property
    def lacks_only_its_end(self) -> bool:
        """Return whether a whole stream has arrived, up to [DONE], but not the end of its body."""
        return self.state is FLOWING and self.is_at_boundary and self._is_done_sent

    def end_with_error(self, failure: Failure, message: str) -> bytes:
        """Return the bytes that report a failure at the end of a stream that has begun.

        The result is b"" in the middle of a chunk or an event, where nothing can be added. Closing
        the client's connection then shows the failure.
        """
        if not self.is_at_boundary:
            return b""
        return self._frame_end(b"" if self._is_done_sent else self._error_event(failure, message))

    def _frame_end(self, event: bytes) -> bytes:
        event = self._last_event(event)
        return event if self.is_http_1_0 else encode_chunk(event) + LAST_CHUNK

    def _client_head(self) -> bytes:
        # Return the HTTP response head to send to the client.
        assert self.head is not None
        chunked = self._must_reframe or isinstance(self._body, ChunkedBody)
        framing = (
            CONNECTION_CLOSE if self.is_http_1_0 else _CHUNKED if chunked else self.head.length_line
        )
        return self.head.head_start + self.own_headers + framing

    def _hold_size_line(self, data: bytes) -> bytes:
        # Return `data` without an incomplete chunk size line at its end, which is held back.
        #
        # The size line may announce the last chunk. Before that chunk, the gateway may have to
        # insert the event [DONE].
        data, self._held_size_line = self._held_size_line + data, self._body.partial
        return data[: len(data) - len(self._held_size_line)]

    def _reframe(self, payload: bytes) -> bytes:
        assert self.head is not None
        if self.rewriter is not None:
            payload = self.rewriter.feed(
                payload, is_sse=self.head.is_sse, is_complete=self._body.is_complete
            )
        if self.translator is not None:
            payload = self.translator.feed(
                payload, is_sse=self.head.is_sse, is_complete=self._body.is_complete
            )
            if self.translator.is_behind:
                self.state = BEHIND
            return self._frame(payload, is_last=not self.translator.is_behind)
        return self._frame(payload, is_last=True)

    def _frame(self, payload: bytes, *, is_last: bool) -> bytes:
        # Return the payload as a chunk for the client, or bare for a client without chunks.
        #
        # `is_last` if all output that the received bytes have led to is in it or before it.
        if self.is_http_1_0:
            return payload
        ends = is_last and self._body.is_complete
        return encode_chunk(payload) + (LAST_CHUNK if ends else b"")

    def _last_event(self, event: bytes) -> bytes:
        # Return a stream's last event, `event`, translated to the client's API if necessary.
        return event if self.translator is None else self.translator.finish_with(event)

    def _missing_done_event(self) -> bytes | None:
        # Return the event [DONE] if the engine omitted it after a complete stream, else None.
        if self._partial_event or self.has_error_event:
            return None
        finished = self._finished_choices or find_finished_choices(self._finish_payload)
        return b"data: [DONE]\n\n" if len(finished) >= self.choice_count else None

    def _finish_body(self, out: bytes) -> bytes:
        # Finish the body; add an error event if the stream is incomplete.
        #
        # Without it, SDKs would take a stream that just ends for complete.
        assert self.head is not None
        if self.head.is_json:
            check_end(self._last_payload)
        self.state = DONE
        if not self._must_reframe and self._body.surplus_bytes:
            out = out[: -self._body.surplus_bytes]
        if not self._must_reframe and self._body.has_trailers:
            # Trailers are dropped: only the gateway's own header fields reach the client.
            out = out[: self._body.last_chunk_offset] + LAST_CHUNK
        if not self._is_sse or self._has_done_marker:
            return out
        if self._last_payload.rstrip().endswith(DONE_MARKER):
            return out
        event = self._missing_done_event()
        if event is None:
            self.has_error_event = True
            event = b"\n\n" if self._partial_event else b""  # complete the partial event
            event += self._error_event(Failure.UPSTREAM_FAILED, "the engine ended its stream early")
        event = self._last_event(event)
        if self.is_http_1_0:
            return out + event
        body = (
            out[: -len(LAST_CHUNK)] if self._must_reframe else out[: self._body.last_chunk_offset]
        )
        return body + encode_chunk(event) + LAST_CHUNK

    def _error_event(self, failure: Failure, message: str) -> bytes:
        return error_event(failure, message)
