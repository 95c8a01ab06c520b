"""A relay for answers whose stream has named events, which an EventGrammar describes. No I/O.

Everything except the meaning of events is inherited from gateway/protocol/response/relay.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.metrics.metric_types import Histogram
from gateway.protocol.error_formats import ErrorFormat
from gateway.protocol.errors import Failure
from gateway.protocol.python_byte_scan import EVENT_MARKER
from gateway.protocol.response.event_grammar import EventGrammar, merge_usage, named_error_status
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.payload_scan import TAIL_BYTES
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.retryable_start import HeldNamedEvents, RetryableStart
from gateway.protocol.response.usage_and_error_search import EVENT_ENDS, USAGE, TokenUsage

_ERROR_DATA = re.compile(rb"(?:^|\n)event: ?error\r?\ndata: ?([^\r\n]*)")


class NamedEventRelay(Relay):
    """Relays one response whose stream has named events, as the grammar of its API describes them.

    Engines announce a response before they compute any part of it. Such events are held back until
    the first one that shows work. If the engine fails before that, another endpoint can serve the
    request.
    """

    __slots__ = ("_errors", "_first_usage", "_grammar")

    def __init__(
        self,
        own_headers: bytes,
        on_first_token: Callable[[], None] | None,
        is_http_1_0: bool,
        rewriter: ModelNameRewriter | None,
        chunk_gaps: Histogram | None,
        grammar: EventGrammar,
        errors: ErrorFormat,
    ) -> None:
        super().__init__(own_headers, on_first_token, is_http_1_0, rewriter, chunk_gaps=chunk_gaps)
        self._grammar, self._errors = grammar, errors
        self._has_named_events = True
        self._first_usage = TokenUsage()

    @property
    def usage(self) -> TokenUsage:
        """Return the token counts of the answer. Valid only when the response is complete."""
        if self._usage_result is None:
            self._scan_rest()
            last = self._grammar.find_usage(self._usage_payload)
            self._usage_result = merge_usage(self._first_usage, last)
        return self._usage_result

    @property
    def finish_reason(self) -> str | None:
        """Return the engine's reason for the end of the answer; None if it gave none."""
        self._scan_rest()
        if self._finish_payload:
            reasons = self._grammar.finish.findall(self._finish_payload)
            self._finish_reason = reasons[-1].decode() if reasons else None
            self._finish_payload = b""
        return self._finish_reason

    def _new_held_start(self) -> RetryableStart:
        return HeldNamedEvents(self._grammar)

    def _find_leading_error(self, data: bytes) -> re.Match[bytes] | None:
        first = self._grammar.first.search(data)
        return first if first is not None and self._is_error(first) else None

    def _is_error(self, event: re.Match[bytes]) -> bool:
        return self._grammar.error.match(event[0]) is not None

    def _leading_error_status(self, data: bytes, error: re.Match[bytes]) -> int | None:
        return named_error_status(data[error.start() :])

    def _refusal_text(self) -> bytes:
        match = _ERROR_DATA.search(self.refusal_body)
        return self.refusal_body if match is None else match[1]

    def _error_event(self, failure: Failure, message: str) -> bytes:
        return self._errors.event(failure, message, bytes(self._unscanned) or self._last_payload)

    def _find_counts(self, text: bytes) -> None:
        super()._find_counts(text)
        if not self._is_sse:
            self._finish_payload = text[-TAIL_BYTES:]

    def _find_event_counts(self, text: bytes) -> None:
        if text.find(USAGE) >= 0:
            self._first_usage = merge_usage(self._first_usage, self._grammar.find_usage(text))
            self._usage_payload = text
        if self._grammar.finish.search(text):
            self._finish_payload = text

    def _find_token(self, payload: bytes, now: float) -> None:
        if self._grammar.token.search(payload):
            self.first_token_at = now
            self._notify_first_token()

    def _scan_events(self, payload: bytes, now: float) -> None:
        # Scan a payload of a stream, together with the incomplete event that precedes it.
        window = self._resume_event(payload, now) if self._partial_event else payload
        if not window:
            return
        grammar = self._grammar
        self.event_count += window.count(EVENT_MARKER) + window.startswith(b"data:")
        if self.first_token_at is None:
            self._find_token(window, now)
        self._find_event_counts(window)
        if window.find(b"event:") >= 0 and not self._has_done_marker:
            self.has_error_event = grammar.error.search(window) is not None
            self._has_done_marker = self.has_error_event or grammar.end.search(window) is not None
        self._last_payload = window
        if not window.endswith(EVENT_ENDS):
            self._keep_partial_event(window)

    def _missing_done_event(self) -> bytes | None:
        return None

    def _finish_body(self, out: bytes) -> bytes:
        if self._is_sse and self._partial_event.strip():
            self._has_done_marker = False  # the stream's last event is cut off
        return super()._finish_body(out)
