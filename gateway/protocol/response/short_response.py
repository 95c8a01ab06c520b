"""Receives a short HTTP/1.1 response as a whole, for the gateway's own requests to engines. No I/O.

Answers to clients are relayed as they arrive instead (gateway/protocol/response/relay.py).
"""

from __future__ import annotations

from gateway.protocol.response.http_response_parser import (
    HEAD_END,
    MAX_HEAD_BYTES,
    FramingError,
    RawBody,
    ResponseBody,
    new_body,
    parse_head,
)
from gateway.protocol.response.retryable_start import PartialHead


class ShortResponse:
    """A response that is being received into memory, up to a limit.

    status           status of the final head; 0 before it has arrived
    body             the payload so far, at most `limit` bytes
    is_complete      whether no more bytes are needed: the end has arrived, or the limit is reached
    can_be_followed  whether the connection can carry another response after this one
    """

    __slots__ = ("_body", "_keep_alive", "_limit", "_partial_head", "body", "is_complete", "status")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial_head: PartialHead | None = None
        self._body: ResponseBody | None = None
        self._keep_alive = False
        self.body = bytearray()
        self.status = 0
        self.is_complete = False

    @property
    def can_be_followed(self) -> bool:
        body = self._body
        return self._keep_alive and body is not None and body.is_complete and not body.surplus_bytes

    @property
    def has_begun(self) -> bool:
        """Return whether at least one byte of the engine's response has arrived."""
        return bool(self.status) or self._partial_head is not None

    def feed(self, data: bytes) -> None:
        """Process the next bytes of an engine's response.

        Raises FramingError if they are not a valid HTTP/1.1 response.
        """
        while self._body is None:
            if self._partial_head is not None:
                data = self._partial_head.add(data)
                if not data:
                    return
            end = data.find(HEAD_END)
            if end < 0:
                if len(data) >= MAX_HEAD_BYTES:
                    raise FramingError(
                        f"the head of the engine's response is longer than {MAX_HEAD_BYTES} bytes"
                    )
                self._partial_head = PartialHead(data) if data else None
                return
            self._partial_head = None
            head, data = data[: end + 2], data[end + len(HEAD_END) :]
            self._read_head(head)
        self.body += self._body.feed(data)
        if len(self.body) >= self._limit:
            del self.body[self._limit :]
            self.is_complete = True
        self.is_complete = self.is_complete or self._body.is_complete

    def _read_head(self, head: bytes) -> None:
        # Bypass the cache of parse_head(): heads of a thousand polled engines would flush it.
        parsed = parse_head.__wrapped__(head)
        if parsed.status < 200:  # an interim response: the final one follows
            return
        self.status, self._keep_alive = parsed.status, parsed.keep_alive
        self._body = new_body(parsed)

    def end(self) -> bool:
        """Handle the end of the engine's connection; return whether the response is complete."""
        self._keep_alive = False
        self.is_complete = self.is_complete or isinstance(self._body, RawBody)
        return self.is_complete
