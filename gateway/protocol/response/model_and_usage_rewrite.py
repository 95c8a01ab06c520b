"""Replaces values in responses as they stream: the model name and the number of cached tokens.

The rewriters take time linear in the response's length and hold back little of it, even in a long
event or JSON body. They are used only if the engine's values differ from those for the client.
"""

from __future__ import annotations

import json
import re

MAX_HELD_EVENT = 64 * 1024
"""Maximum bytes of an incomplete event that are held back; a longer event is released as it
arrives.
"""
_SEAM = 2  # bytes before a piece that may be the first part of an event's end
_MAX_BLANKS = 64  # maximum number of blanks between a member's name and its value
_MAX_NAME = 128  # characters of a name
ANY_NAME = rb'"(?:[^"\\]|\\.){1,%d}"' % _MAX_NAME
"""A pattern of all model names in JSON, with their quotes."""
_VERSION = rb"(?:[-@:][\w.:@-]{1,32})?"
_MAX_VERSION = 33


def versioned_name(served: str) -> bytes:
    """Return a pattern for a model name in JSON, with or without a version such as -2024-07-18."""
    return re.escape(json.dumps(served, ensure_ascii=False).encode()[:-1]) + _VERSION + b'"'


class ModelNameRewriter:
    """Replaces `"model": "<served>"` in a payload as it streams.

    Server-sent events are processed one by one, and JSON as it arrives. Text cannot match the
    pattern, because quotes in JSON strings are escaped.

    is_mid_event  whether part of an event has been returned, but not its end
    """

    def __init__(self, served: str, requested_model: str, names: bytes = b"") -> None:
        """Create a rewriter for one answer.

        served           the engine's name of the model
        requested_model  the client's name of the model
        names            pattern of the names to replace, if engines may answer with others than
                         `served`
        """
        old, new = (
            json.dumps(name, ensure_ascii=False).encode() for name in (served, requested_model)
        )
        pattern = rb'("model":[ \t\r\n]{0,%d})%b' % (_MAX_BLANKS, names or re.escape(old))
        self._model = re.compile(pattern)
        self._replacement = lambda match: match[1] + new
        longest = max(2 * _MAX_NAME + 2, len(old) + _MAX_VERSION) if names else len(old)
        self._longest_match = len(b'"model":') + _MAX_BLANKS + longest
        self._pending = bytearray()
        self.is_mid_event = False

    def feed(self, payload: bytes, *, is_sse: bool, is_complete: bool) -> bytes:
        """Process a piece of the payload, and return it with the model's name replaced.

        If the piece may end within the name, its end is held back until the next call.
        """
        pending = self._pending
        if pending and is_sse and not is_complete and not self._may_release(payload):
            pending += payload
            return b""
        window = bytes(pending) + payload if pending else payload
        cut = len(window) if is_complete else self._releasable(window, sse=is_sse)
        if pending or cut < len(window):
            self._pending = bytearray(window[cut:])
        return self._rewrite(window[:cut]) if cut else b""

    def _may_release(self, payload: bytes) -> bool:
        # Return whether an event ends in `payload`, or has become too long to be held.
        #
        # The bytes before it have been searched, so a long event in many pieces takes linear time.
        has_end = whole_events_length(bytes(self._pending[-_SEAM:]) + payload) > 0
        return has_end or len(self._pending) + len(payload) > MAX_HELD_EVENT

    def _releasable(self, window: bytes, *, sse: bool) -> int:
        # Return how many bytes can be released without splitting a match or a short event.
        whole = whole_events_length(window) if sse else 0
        if sse and len(window) - whole <= MAX_HELD_EVENT:
            self.is_mid_event = self.is_mid_event and not whole
            return whole
        self.is_mid_event = sse
        return self._move_past_match(window, max(0, len(window) - self._longest_match))

    def _move_past_match(self, window: bytes, cut: int) -> int:
        # Return `cut`, or the end of the match that it would split.
        for pattern in self._patterns():
            for match in pattern.finditer(window, max(0, cut - self._longest_match)):
                if match.start() < cut < match.end():
                    cut = match.end()
        return cut

    def _patterns(self) -> tuple[re.Pattern[bytes], ...]:
        return (self._model,)

    def _rewrite(self, ready: bytes) -> bytes:
        return self._model.sub(self._replacement, ready)


class CachedTokensRewriter(ModelNameRewriter):
    """Replaces two values in a response: the model's name, and the number of cached tokens.

    If a prefill engine has computed the prompt, the decode engine counts the transferred KV cache
    as cached tokens. The client gets the prefill engine's number instead.

    cached_tokens  the prefill engine's number, set when its response arrives; None keeps the decode
                   engine's number
    """

    _CACHED = re.compile(rb'("cached_tokens":[ \t\r\n]{0,%d})\d{1,15}' % _MAX_BLANKS)

    def __init__(self, served: str, requested_model: str) -> None:
        super().__init__(served, requested_model)
        self._longest_match = max(self._longest_match, len(b'"cached_tokens":') + _MAX_BLANKS + 15)
        self.cached_tokens: int | None = None

    def _patterns(self) -> tuple[re.Pattern[bytes], ...]:
        return (self._model, self._CACHED)

    def _rewrite(self, ready: bytes) -> bytes:
        ready = super()._rewrite(ready)
        if self.cached_tokens is None or ready.find(b'"cached_tokens"') < 0:
            return ready
        return self._CACHED.sub(rb"\g<1>%d" % self.cached_tokens, ready)


def whole_events_length(text: bytes) -> int:
    """Return the length of the complete events in `text` in bytes: up to its last blank line."""
    if text.find(b"\n") < 0:  # fifty times faster than to search for two bytes
        return 0
    lf, crlf = text.rfind(b"\n\n"), text.rfind(b"\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
