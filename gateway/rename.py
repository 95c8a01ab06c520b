"""Answers that must not pass as they came: the engine's model name becomes the one the client asked for, and a
decoder's idea of cached tokens becomes the prefiller's. Used only where they differ."""

from __future__ import annotations

import json
import re


class Renamer:
    """Rewrites `"model": "<served>"` in a payload as it streams. SSE is released event by event, JSON at its end.

    Inside JSON strings quotes are escaped, so the pattern can only match a member.
    """

    def __init__(self, served: str, asked: str) -> None:
        name = json.dumps(asked, ensure_ascii=False).encode()
        self._pattern = re.compile(rb'("model":\s*)' + re.escape(json.dumps(served, ensure_ascii=False).encode()))
        self._replacement = lambda found: found[1] + name
        self._pending = b""

    def feed(self, payload: bytes, *, sse: bool, ended: bool) -> bytes:
        """Payload in, renamed payload out; what could still be cut inside the pattern waits for the next call."""
        self._pending += payload
        whole = len(self._pending) if ended else whole_events(self._pending) if sse else 0
        if not whole and not ended:
            return b""
        ready, self._pending = self._pending[:whole], self._pending[whole:]
        return self._pattern.sub(self._replacement, ready)


class Corrector(Renamer):
    """Also says what the prefiller had cached. A decoder that was handed the KV calls all of it a cache hit.

    `cached_tokens` may be set as late as the prefill answer comes; None leaves the decoder's number.
    """

    _PATTERN = re.compile(rb'("cached_tokens":\s*)\d+')

    def __init__(self, served: str, asked: str) -> None:
        super().__init__(served, asked)
        self.cached_tokens: int | None = None

    def feed(self, payload: bytes, *, sse: bool, ended: bool) -> bytes:
        ready = super().feed(payload, sse=sse, ended=ended)
        if self.cached_tokens is None or b'"cached_tokens"' not in ready:
            return ready
        return self._PATTERN.sub(rb"\g<1>%d" % self.cached_tokens, ready)


def whole_events(text: bytes) -> int:
    """How many bytes of it are whole events: up to the last blank line, however lines end."""
    plain, crlf = text.rfind(b"\n\n"), text.rfind(b"\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
