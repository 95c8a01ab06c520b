"""Relays a stream so that another engine can continue it, and relays its rest from that engine."""

from __future__ import annotations

from gateway.protocol.response.relay import Relay
from gateway.protocol.response.token_ledger import LedgerRecorder
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.protocol.upstream_error import UpstreamError

_DONE = b"[DONE]"


class RecordedRelay(Relay):
    """Relays an answer and records its tokens, so that another engine can continue its stream.

    Where a plain relay would end the answer with an error, this one raises UpstreamError. The
    client receives complete events only, so that another event may follow at any time.
    """

    __slots__ = ()

    @property
    def is_at_boundary(self) -> bool:
        """Return whether an event may follow the events that the client has received."""
        return self._is_sse and self.is_committed

    @property
    def _is_done_sent(self) -> bool:
        # Return whether the client has received the last event, according to the ledger.
        #
        # The relay itself may have seen events that were discarded by rewind().
        return self._recorder.ledger.is_done

    @property
    def _recorder(self) -> LedgerRecorder:
        assert isinstance(self.rewriter, LedgerRecorder)
        return self.rewriter

    def _finish_body(self, out: bytes) -> bytes:
        unfinished = self._partial_event or self._recorder.ledger.finish_reason is None
        if (
            self._is_sse
            and not self._has_done_marker
            and unfinished
            and not self._last_payload.rstrip().endswith(_DONE)
        ):
            self._recorder.ledger.rewind()
            raise UpstreamError(
                "truncated", "the engine ended its stream before its answer was complete"
            )
        return super()._finish_body(out)

    def _missing_done_event(self) -> bytes | None:
        # Return the events that are missing at the end of the whole answer.
        #
        # Return None if the answer is incomplete.
        ledger = self._recorder.ledger
        return None if ledger.finish_reason is None else ledger.render_end()

    def add_rest(self, rest: Relay, usage: TokenUsage) -> None:
        """Add what another engine sent of the answer to this relay's counts of bytes and events.

        rest   the relay that received the rest of the answer from that engine
        usage  the token counts of the whole answer
        """
        self.bytes_sent += rest.bytes_sent
        self.event_count += rest.event_count
        self.last_data_at = rest.last_data_at or self.last_data_at
        rest._scan_rest()
        self._unscanned.clear()
        self._finish_payload = rest._finish_payload
        self._usage_result = usage


class ContinuationRelay(RecordedRelay):
    """Relays the rest of a broken answer from another engine.

    It returns no response head, because the client has received one.
    """

    __slots__ = ()

    def _client_head(self) -> bytes:
        return b""
