"""How a relayed stream ends for the client: with the engine's [DONE], an added one, or an error.

Engines may end a stream without the event [DONE], or break off in the middle. Without an error
event, SDKs would take a stream that just ends for complete. No I/O.
"""

from __future__ import annotations

from gateway.protocol.errors import Failure, error_event
from gateway.protocol.response.client_framing import ClientFraming
from gateway.protocol.response.held_answer import check_end
from gateway.protocol.response.http_response_parser import LAST_CHUNK, encode_chunk
from gateway.protocol.response.relay_state import DONE, FLOWING
from gateway.protocol.response.usage_and_error_search import DONE_MARKER, find_finished_choices


class StreamEnd(ClientFraming):
    """The part of a relay that ends a stream for the client: with [DONE], or with an error event.

    The subclass `Relay` adds what reads the engine's bytes.
    """

    __slots__ = ()

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
