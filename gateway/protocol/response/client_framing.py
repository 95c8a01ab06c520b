"""Frames what a relay sends to the client: the response head and the chunks.

The payload is rewritten first if the model name must change, and translated if the client speaks
another API than the engine. stream_end.py adds the last events of a stream. No I/O.
"""

from __future__ import annotations

from gateway.protocol.response.http_response_parser import (
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
from gateway.protocol.response.relay_state import BEHIND, RelayState
from gateway.protocol.translate.translator import AnswerTranslator

CONNECTION_CLOSE = b"connection: close\r\n\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class ClientFraming(PayloadScan):
    """The part of a relay that builds what the client receives: the response head and the chunks.

    The subclass `StreamEnd` adds the end of a stream.
    """

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
