"""Aliases in answers: the engine's model name becomes the one the client asked for. Used only when they differ."""

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
        whole = len(self._pending) if ended else self._pending.rfind(b"\n\n") + 2 if sse else 0
        if whole < 2 and not ended:
            return b""
        ready, self._pending = self._pending[:whole], self._pending[whole:]
        return self._pattern.sub(self._replacement, ready)
