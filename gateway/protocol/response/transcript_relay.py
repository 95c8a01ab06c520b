"""A relay for answers of the audio APIs. No I/O.

vLLM streams a transcription as chunks of a chat. OpenAI streams it as events whose member `type`
names them; the last one, with the whole text, is a proper end without [DONE].
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.metrics.metric_types import Histogram
from gateway.protocol.response.event_grammar import RESPONSES
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage

_TYPE = b'"transcript.text.'
_TOKEN = re.compile(rb'"type":\s{0,64}"transcript\.text\.(?:delta|segment)"')
_END = re.compile(rb'"type":\s{0,64}"transcript\.text\.done"')


class TranscriptRelay(Relay):
    """Relays one transcription or translation, whole or as a stream of either kind of events."""

    __slots__ = ()

    def __init__(
        self,
        own_headers: bytes,
        on_first_token: Callable[[], None] | None,
        is_http_1_0: bool,
        rewriter: ModelNameRewriter | None,
        chunk_gaps: Histogram | None,
    ) -> None:
        super().__init__(own_headers, on_first_token, is_http_1_0, rewriter, chunk_gaps=chunk_gaps)
        self._has_named_events = True  # every event is scanned for its type

    @property
    def usage(self) -> TokenUsage:
        """Return the token counts of the answer. Valid only when the response is complete."""
        if self._usage_result is None:
            counts = super().usage
            if counts == TokenUsage():  # OpenAI names them as in Responses
                counts = RESPONSES.find_usage(self._usage_payload)
            self._usage_result = counts
        return self._usage_result

    @property
    def _is_done_sent(self) -> bool:
        return self._has_done_marker and not self._partial_event

    def _find_token(self, payload: bytes, now: float) -> None:
        if payload.find(_TYPE) < 0:
            super()._find_token(payload, now)
        elif _TOKEN.search(payload):
            self.first_token_at = now
            self._notify_first_token()

    def _scan_events(self, payload: bytes, now: float) -> None:
        super()._scan_events(payload, now)
        if self._last_payload.find(_TYPE) >= 0 and _END.search(self._last_payload):
            self._has_done_marker = True

    def _finish_body(self, out: bytes) -> bytes:
        if self._is_sse and self._partial_event.strip():
            self._has_done_marker = False  # the stream's last event is cut off
        return super()._finish_body(out)
