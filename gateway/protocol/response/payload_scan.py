"""Decides which arriving bytes of a response are searched for tokens and counts, piece by piece.

A payload may arrive in many small pieces. Together with a piece, at most MAX_RESCAN bytes before it
are scanned. Only a piece that ends a long event is scanned with that whole event. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.protocol.python_byte_scan import ERROR_NAME, EVENT_MARKER
from gateway.protocol.response.long_event import first_event_length
from gateway.protocol.response.usage_and_error_search import (
    DONE_MARKER,
    ERROR_EVENT_PATTERN,
    EVENT_ENDS,
    FINISH_REASON,
    LONGEST_MATCH,
    TOKEN_PATTERN,
    USAGE,
    TokenUsage,
    find_finish_reason,
    find_finished_choices,
    find_usage,
    has_done_marker,
    last_event_end,
)

MAX_PARTIAL_EVENT = 64 * 1024  # bytes of a partial event that are kept for scanning
MAX_RESCAN = 1024  # bytes of a partial event that are scanned again at every read
TAIL_BYTES = 16 * 1024  # bytes of a plain response that are kept for scanning


_NOTHING = bytearray()  # stands for "no bytes"; never changed


class PayloadScan:
    """Finds tokens, token counts, finish reasons and errors in the payload of one response.

    The payload is scanned piece by piece, as it arrives.

    on_first_token   called once, at the first generated token
    choice_count     number of choices that the client requested; each ends with a finish reason
    has_error_event  whether the stream ended with an error event, of the engine or of the gateway
    first_token_at   when the first token arrived, as given by the caller; None before that
    """

    __slots__ = (
        *("_finish_payload", "_finish_reason", "_finished_choices", "_has_done_marker", "_is_sse"),
        *("_last_payload", "_partial_event", "_reason_marker", "_unscanned", "_usage_payload"),
        *("_usage_result", "choice_count", "event_count", "first_token_at", "has_error_event"),
        "on_first_token",
    )

    def _init_scan(self, on_first_token: Callable[[], None] | None, choice_count: int) -> None:
        # Initialize. It is no constructor, because super() takes longer than this.
        self.on_first_token = on_first_token
        self.choice_count = choice_count
        self.first_token_at: float | None = None
        self.has_error_event = self._is_sse = False
        self.event_count = 0
        self._usage_payload = b""  # the newest payload with token counts
        self._finish_payload = b""  # the newest payload with a finish reason, until that is parsed
        self._usage_result: TokenUsage | None = None
        self._finish_reason: str | None = None
        # The part received so far of a long event, or of the end of an unstreamed response.
        self._unscanned = _NOTHING

    def _begin_scan(self, is_sse: bool) -> None:
        # The fields below are needed only if the response arrives in more than one read.
        self._is_sse = is_sse
        self._unscanned = bytearray()
        self._has_done_marker = False
        self._partial_event = b""  # the partial event at the end of the last payload, or its end
        self._last_payload = b""  # the newest payload, including the event it began in
        self._finished_choices = frozenset[int]()  # indices of finished choices if several
        self._reason_marker = FINISH_REASON  # the first bytes of a finish reason in this stream

    @property
    def usage(self) -> TokenUsage:
        """Return the token counts of the answer. Valid only when the response is complete.

        The counts are parsed at the first access.
        """
        if self._usage_result is None:
            if self._unscanned:
                self._scan_rest()
            self._usage_result = find_usage(self._usage_payload)
        return self._usage_result

    @property
    def finish_reason(self) -> str | None:
        """Return the engine's reason for the end of the answer; None if it gave none."""
        if self._unscanned:
            self._scan_rest()
        if self._finish_payload:
            self._finish_reason = find_finish_reason(self._finish_payload)
            self._finish_payload = b""
        return self._finish_reason

    def _notify_first_token(self) -> None:
        # Call on_first_token once, then drop it, because it would form a reference cycle.
        on_first, self.on_first_token = self.on_first_token, None
        if on_first is not None:
            on_first()

    def _scan_plain(self, payload: bytes, now: float) -> None:
        # Scan a part of a response that is not a stream; its first byte counts as the first token.
        #
        # All of it is scanned, since optional members such as prompt_logprobs can follow `usage`.
        if self.first_token_at is None:
            self.first_token_at = now
            self._notify_first_token()
        self._last_payload = payload
        self._unscanned += payload
        if len(self._unscanned) > 2 * TAIL_BYTES:
            self._find_counts(bytes(self._unscanned))
            del self._unscanned[:-TAIL_BYTES]

    def _scan_rest(self) -> None:
        # Find the counts in bytes that were received but not scanned, at the end of a response.
        if self._unscanned:
            self._find_counts(bytes(self._unscanned))
            self._unscanned.clear()

    def _find_counts(self, text: bytes) -> None:
        # Keep what a later parser needs of the token counts and the finish reason in `text`.
        if self._is_sse:
            self._find_event_counts(text)
            return
        usage, reason = text.rfind(USAGE), text.rfind(FINISH_REASON)
        if usage >= 0:
            self._usage_payload = text[usage : usage + TAIL_BYTES]
        if reason >= 0:
            self._finish_payload = text[reason : reason + TAIL_BYTES]

    def _find_event_counts(self, text: bytes) -> None:
        if text.find(USAGE) >= 0:
            self._usage_payload = text
        if text.find(self._reason_marker) >= 0:
            self._finish_payload = text
            if self.choice_count > 1:
                self._finished_choices |= find_finished_choices(text)

    def _scan_events(self, payload: bytes, now: float) -> None:
        # Scan a payload of a stream, together with the incomplete event that precedes it.
        #
        # Uses find(), because `in` first tries bytes as an int, at the cost of an exception.
        if self._partial_event:
            payload = self._resume_event(payload, now)
            if not payload:
                return
        self.event_count += payload.count(EVENT_MARKER) + payload.startswith(b"data:")
        if self.first_token_at is None:
            self._find_token(payload, now)
        if payload.find(USAGE) >= 0:
            self._usage_payload = payload
        if payload.find(self._reason_marker) >= 0:
            self._finish_payload = payload
            if self.choice_count > 1:
                self._finished_choices |= find_finished_choices(payload)
        if payload.find(ERROR_NAME) >= 0 and (error := ERROR_EVENT_PATTERN.search(payload)):
            self._note_error_event(error)
        self._last_payload = payload
        if payload.find(DONE_MARKER) >= 0 and has_done_marker(payload):
            self._has_done_marker = True
        if not payload.endswith(EVENT_ENDS):
            self._keep_partial_event(payload)

    def _note_error_event(self, event: re.Match[bytes]) -> None:
        self.has_error_event = True

    def _find_token(self, payload: bytes, now: float) -> None:
        if TOKEN_PATTERN.search(payload):
            self.first_token_at = now
            self._notify_first_token()

    def _keep_partial_event(self, payload: bytes) -> None:
        # Keep the incomplete event at the end of `payload`.
        #
        # A short one is scanned again with the next payload. Of a long one only the end is, so that
        # an event that arrives in many pieces takes linear time.
        partial = payload[last_event_end(payload) :]
        if len(partial) > MAX_RESCAN:
            self._unscanned += partial[-MAX_PARTIAL_EVENT:]
            partial = partial[-LONGEST_MATCH:]
        self._partial_event = partial

    def _resume_event(self, payload: bytes, now: float) -> bytes:
        # Return `payload` with the incomplete event of the previous payload in front of it.
        #
        # Return b"" while a long event continues. That event is scanned as a whole at its end.
        if not self._unscanned:
            carry, self._partial_event = self._partial_event, b""
            self.event_count -= _count_events(carry)  # events in `carry` were counted before
            return carry + payload
        window = self._partial_event + payload
        if first_event_length(window):
            self._partial_event = b""
            carry = bytes(self._unscanned)
            self._unscanned.clear()
            self.event_count -= _count_events(carry)
            return carry + payload
        self.event_count += _count_events(window) - _count_events(self._partial_event)
        self._partial_event = window[-LONGEST_MATCH:]
        self._last_payload = window
        self._unscanned += payload
        if self.first_token_at is None:
            self._find_token(window, now)
        if len(self._unscanned) > 2 * MAX_PARTIAL_EVENT:
            self._find_event_counts(bytes(self._unscanned))
            del self._unscanned[:-MAX_PARTIAL_EVENT]
        return b""


def _count_events(text: bytes) -> int:
    has_lines = text.find(b"\n") >= 0  # this search is much faster than counting markers
    return (text.count(EVENT_MARKER) if has_lines else 0) + text.startswith(b"data:")
