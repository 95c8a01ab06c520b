"""What the events of one stream look like around their text: those that differ in it alone need no second look.

An engine's events of one answer are equal but for the text of a token (those that count something in each gain nothing
here). Most of what a chunk costs is looking for what is not there; two comparisons tell that it cannot be.
"""

from __future__ import annotations

import re

from gateway.protocol.response_framing import Body, ChunkedBody
from gateway.protocol.stream_scan import REASON, USAGE

GUESSES = 8
"""How often a stream is asked how its events look: reasoning, text and tool calls follow each other, each with a look
of its own. The newest one counts; an event that has none takes one of these, too."""

_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|refusal|arguments)":\s*"(?=[^"])')
_BEHIND = len(b"\n\n\r\n")  # the end of an event, and of its chunk


class Likeness:
    """An event that was looked at, and the bytes before its text and from the text's closing quote on.

    counts  it tells token counts, or that there are none yet
    """

    __slots__ = ("_body", "_end", "_start", "counts", "event")

    def __init__(self, body: ChunkedBody, event: bytes, start: bytes, end: bytes) -> None:
        self._body: ChunkedBody = body
        self.event = event
        self._start = start
        self._end = end
        self.counts = event.find(USAGE) >= 0

    def fits(self, data: bytes) -> bool:
        """Whether these bytes are one whole chunk with one whole event that looks so.

        Whatever a relay looks for in an event has a quote or the end of a line in it. In the text there is neither, and
        all around it is as it was: what was there is there again, word for word, and what was not is not.
        """
        at = self._body.whole(data)
        if not at or not data.startswith(self._start, at) or not data.endswith(self._end):
            return False
        at += len(self._start)
        return data.find(b'"', at) == len(data) - len(self._end) and data.find(b"\n", at) == len(data) - _BEHIND


def likeness(body: Body, data: bytes, payload: bytes) -> Likeness | None:
    """How the event looks that `data` brought as `payload`. None where it came otherwise than as one whole chunk, is
    not one whole event, is the last one with text, or has none in a place where it is known to be."""
    if not isinstance(body, ChunkedBody):
        return None
    at = body.whole(data)
    if not at or data[at:-2] != payload or payload.count(b"\n") != 2 or not payload.endswith(b"\n\n"):
        return None
    found = _TEXT.search(payload)
    if found is None or not payload.startswith(b"data:") or payload.find(REASON) >= 0:
        return None
    quote = payload.find(b'"', found.end())
    # A quote of the text itself, or the beginning of what could be the end of a key.
    if payload[quote - 1 : quote] == b"\\" or payload.startswith(b":", quote + 1):
        return None
    return Likeness(body, payload, payload[: found.end()], data[at + quote :])
