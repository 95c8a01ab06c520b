"""Answers that must not pass as they came: the engine's model name becomes the one the client asked for, and a
decoder's idea of cached tokens becomes the prefiller's. Used only where they differ.

The work is linear in the bytes of an answer and little of it is held, however long an event or a JSON body is.
"""

from __future__ import annotations

import json
import re

HELD_EVENT = 64 * 1024
"""Bytes of an unfinished event that are held; a longer one is released as it comes."""
_BLANKS = 64  # between a member's name and its value


class Renamer:
    """Rewrites `"model": "<served>"` in a payload as it streams. SSE is released event by event, JSON as it comes.

    Inside JSON strings quotes are escaped, so the pattern can only match a member.

    mid_event  part of an event has been released, and not its end
    """

    def __init__(self, served: str, asked: str) -> None:
        found, put = (json.dumps(name, ensure_ascii=False).encode() for name in (served, asked))
        self._model = re.compile(rb'("model":[ \t\r\n]{0,%d})%b' % (_BLANKS, re.escape(found)))
        self._replacement = lambda match: match[1] + put
        self._longest = len(b'"model":') + _BLANKS + len(found)
        self._pending = b""
        self.mid_event = False

    def feed(self, payload: bytes, *, sse: bool, ended: bool) -> bytes:
        """Payload in, renamed payload out; what may be the beginning of a match waits for the next call."""
        window = self._pending + payload if self._pending else payload
        cut = len(window) if ended else self._releasable(window, sse=sse)
        self._pending = window[cut:]
        return self._rewritten(window[:cut]) if cut else b""

    def _releasable(self, window: bytes, *, sse: bool) -> int:
        """How many bytes can be released: whole events, or what no match that goes on can begin in."""
        whole = whole_events(window) if sse else 0
        if sse and len(window) - whole <= HELD_EVENT:
            self.mid_event = self.mid_event and not whole
            return whole
        self.mid_event = sse
        return self._between_matches(window, max(0, len(window) - self._longest))

    def _between_matches(self, window: bytes, cut: int) -> int:
        """The place `cut`, or the end of the match that it is inside of."""
        for pattern in self._patterns():
            for match in pattern.finditer(window, max(0, cut - self._longest)):
                if match.start() < cut < match.end():
                    cut = match.end()
        return cut

    def _patterns(self) -> tuple[re.Pattern[bytes], ...]:
        return (self._model,)

    def _rewritten(self, ready: bytes) -> bytes:
        return self._model.sub(self._replacement, ready)


class Corrector(Renamer):
    """Also says what the prefiller had cached. A decoder that was handed the KV calls all of it a cache hit.

    `cached_tokens` may be set as late as the prefill answer comes; None leaves the decoder's number.
    """

    _CACHED = re.compile(rb'("cached_tokens":[ \t\r\n]{0,%d})\d{1,15}' % _BLANKS)

    def __init__(self, served: str, asked: str) -> None:
        super().__init__(served, asked)
        self._longest = max(self._longest, len(b'"cached_tokens":') + _BLANKS + 15)
        self.cached_tokens: int | None = None

    def _patterns(self) -> tuple[re.Pattern[bytes], ...]:
        return (self._model, self._CACHED)

    def _rewritten(self, ready: bytes) -> bytes:
        ready = super()._rewritten(ready)
        if self.cached_tokens is None or ready.find(b'"cached_tokens"') < 0:
            return ready
        return self._CACHED.sub(rb"\g<1>%d" % self.cached_tokens, ready)


def whole_events(text: bytes) -> int:
    """How many bytes of it are whole events: up to the last blank line, however lines end."""
    plain, crlf = text.rfind(b"\n\n"), text.rfind(b"\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
