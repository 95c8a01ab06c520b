"""Holds back an engine's whole JSON answer until it is known to be complete. No I/O.

The client loses nothing by the wait, because it cannot use a part of a JSON document. Until the
end, another endpoint can serve the request instead.
"""

from __future__ import annotations

import json

import msgspec

from gateway.protocol.response.http_response_parser import FramingError, ResponseHead, new_body
from gateway.protocol.upstream_error import UpstreamError

MAX_HELD_ANSWER = 1024 * 1024
"""Maximum bytes of an answer that is held back. A longer one is forwarded as it arrives."""

_skim = msgspec.json.Decoder(msgspec.Raw).decode  # reads the text without creating its values
_BLANKS = b" \t\r\n"


def check_json(text: bytes | bytearray) -> None:
    """Raise UpstreamError if a complete answer is not JSON, for example because it was cut off.

    Everything that Python's standard parser accepts is permitted, such as NaN, lone surrogates, and
    control characters in strings, because clients in Python can read it.
    """
    try:
        _skim(text)
    except RecursionError:
        return
    except msgspec.DecodeError:
        try:
            json.loads(text.decode("utf-8", "replace"), strict=False)
        except RecursionError:
            return
        except ValueError as error:
            raise malformed() from error


def check_end(last: bytes) -> None:
    """Raise UpstreamError if a long JSON answer is cut off: it must end an object or an array.

    last  the last bytes of the answer
    """
    end = last.rstrip(_BLANKS)[-1:]
    if end and end not in b"}]":
        raise malformed()


def malformed() -> UpstreamError:
    return UpstreamError("malformed", "the engine's answer is not valid JSON")


class HeldAnswer:
    """A whole answer of an engine that is being received, with its HTTP framing removed.

    head           the head of the response
    data           the received bytes, with the framing
    payload        the received bytes, without the framing
    surplus_bytes  number of bytes received after the end
    """

    __slots__ = ("_body", "_may_begin_blank", "data", "head", "payload")

    def __init__(self, head: ResponseHead, *, may_begin_blank: bool) -> None:
        """Create an empty answer with this head.

        may_begin_blank  whether blanks before the JSON are held back too. Providers send them to
                         keep the connection alive while they compute
        """
        self.head, self._body = head, new_body(head)
        self._may_begin_blank = may_begin_blank
        self.data, self.payload = bytearray(), bytearray()

    def is_overdue(self, now: float, asked_at: float | None) -> bool:
        """Return False: however long the client waits, part of a JSON answer is of no use."""
        return False

    @property
    def is_complete(self) -> bool:
        return self._body.is_complete

    @property
    def surplus_bytes(self) -> int:
        return self._body.surplus_bytes

    def is_undecided(self, piece: bytes) -> bool:
        """Add received bytes, and return whether the answer must be held back for longer.

        Raises UpstreamError if its framing is invalid.
        """
        try:
            self.payload += self._body.feed(piece)
        except FramingError as error:
            raise UpstreamError("framing", str(error)) from error
        self.data += piece
        expected = max(self.head.length or 0, len(self.data))
        if self._body.is_complete or expected > MAX_HELD_ANSWER:
            return False
        return self._may_begin_blank or not self.payload or bool(self.payload.lstrip(_BLANKS))
