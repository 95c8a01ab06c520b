"""The beginning of an engine's response, held back while the request may be retried. No I/O.

A beginning may arrive in many small reads. Therefore no read copies or searches the earlier bytes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from gateway.protocol.response.event_grammar import EventGrammar
from gateway.protocol.response.http_response_parser import HEAD_END, MAX_HEAD_BYTES
from gateway.protocol.response.usage_and_error_search import (
    DATA_LINE,
    DONE_MARKER,
    ERROR_EVENT_PATTERN,
    EVENT_ENDS,
    HELD_IDS_BYTES,
    LONGEST_MATCH,
    MAX_COMMENTS_S,
    MAX_FIRST_EVENT,
    MAX_HELD_BYTES,
    MAX_HELD_EVENTS,
    MAX_LEADING_ERROR,
    PROMPT_IDS,
    QUOTED_FINISH_REASON,
    TOKEN_PATTERN,
    leading_error_end,
)
from gateway.protocol.upstream_error import UpstreamError

_EVENT_MARKER, _LONGEST_END = b"\ndata:", max(map(len, EVENT_ENDS))
# The last chunk, with its trailer fields. Comments that end in the time may look similar.
_LAST_CHUNK = re.compile(
    rb"(?:\A|\n)0{1,15}(?:;[^\r\n]{0,256})?\r\n(?:[^\r\n]{1,1024}\r\n){0,32}\r\n\Z"
)
_MAX_LAST_CHUNK = 4096
# The line with the size of a chunk, and the beginning of a comment.
_FIRST_COMMENT = re.compile(rb"[0-9a-fA-F]{1,15}[^\r\n]{0,288}\r\n[\r\n]{0,4}:")


class PartialHead:
    """The beginning of a response head that is not complete yet."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)

    def add(self, data: bytes) -> bytes:
        """Add received bytes; return all of them if the head is complete or too long, else b""."""
        searched = max(0, len(self._data) - len(HEAD_END) + 1)
        self._data += data
        if self._data.find(HEAD_END, searched) < 0 and len(self._data) < MAX_HEAD_BYTES:
            return b""
        return bytes(self._data)


class RetryableStart(ABC):
    """Holds back the beginning of a stream while the request may still be sent to another engine.

    There is a subclass for each kind of events.

    data  the bytes received so far, with chunk framing
    """

    __slots__ = ("_error_end", "_since", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._since: float | None = None
        self._error_end = -1  # where the first bytes of an error event end; -1 without one

    def is_undecided(self, piece: bytes) -> bool:
        """Add received bytes, and return whether the response must still be held back.

        The response is held back while the stream may still begin with an error. Raises
        UpstreamError if the stream has ended before its first event.
        """
        searched = len(self.data)
        self.data += piece
        if self._error_end < 0:
            self._error_end = self._find_error(max(0, searched - LONGEST_MATCH))
        if self._error_end < 0:
            return self._is_held_longer(searched)
        start = max(self._error_end, searched - _LONGEST_END)
        is_whole = any(self.data.find(end, start) >= 0 for end in EVENT_ENDS)
        return len(self.data) < MAX_LEADING_ERROR and not (is_whole or self._has_ended)

    def is_overdue(self, now: float, asked_at: float | None) -> bool:
        """Return whether the held bytes must be sent now, because the client has waited too long.

        Comments and events keep the client's connection alive, so they are held for a limited time.
        The result is False once an error event has begun: it will be complete soon, and may show
        that the client's request caused the error.

        now       the time, in monotonic seconds
        asked_at  when the client's request came; None: the wait counts from the first call
        """
        if self._since is None:
            self._since = now if asked_at is None else asked_at
        return self._error_end < 0 and now - self._since >= MAX_COMMENTS_S

    @property
    def _has_ended(self) -> bool:
        data = self.data
        start = max(0, len(data) - _MAX_LAST_CHUNK)
        return data.endswith(HEAD_END) and _LAST_CHUNK.search(data, start) is not None

    @abstractmethod
    def _find_error(self, start: int) -> int:
        """Search `data` from `start` for an error event; return the end offset of the match.

        Returns -1 if there is none.
        """

    @abstractmethod
    def _is_held_longer(self, searched: int) -> bool:
        """Return whether a stream that has begun without an error is held back longer.

        The first `searched` bytes of `data` were searched by earlier calls.
        """


class HeldChunks(RetryableStart):
    """Holds back the beginning of a stream of chat or completion chunks, until its first event.

    With `hold_until_token`, the stream is held back until its first token. Comments do not count as
    events, because engines send them while the prompt waits or is computed.
    """

    __slots__ = (
        *("_begins_with_comment", "_data_at", "_event_count", "_hold_until_token", "_limit"),
    )

    def __init__(self, hold_until_token: bool) -> None:
        super().__init__()
        self._hold_until_token = hold_until_token
        self._begins_with_comment = False
        self._data_at = -1  # where the first line with data begins
        self._event_count = 0
        self._limit = MAX_HELD_BYTES

    def is_overdue(self, now: float, asked_at: float | None) -> bool:
        """Return whether the client has waited too long, while only comments have arrived."""
        holds_comments = self._begins_with_comment and self._data_at < 0
        return holds_comments and super().is_overdue(now, asked_at)

    def _find_error(self, start: int) -> int:
        end = len(self.data) if self._hold_until_token else leading_error_end(self.data)
        error = ERROR_EVENT_PATTERN.search(self.data, start, end)
        return -1 if error is None else error.end()

    def _is_held_longer(self, searched: int) -> bool:
        data = self.data
        if not self._hold_until_token:
            return self._is_first_event_incomplete(searched)
        self._event_count += data.count(_EVENT_MARKER, max(0, searched - len(_EVENT_MARKER) + 1))
        if data.find(PROMPT_IDS, max(0, searched - len(PROMPT_IDS) + 1)) >= 0:
            self._limit = HELD_IDS_BYTES
        is_short = len(data) < self._limit and self._event_count <= MAX_HELD_EVENTS
        return is_short and not self._is_decisive(max(0, searched - LONGEST_MATCH))

    def _is_first_event_incomplete(self, searched: int) -> bool:
        data = self.data
        if not self._begins_with_comment:
            self._begins_with_comment = _FIRST_COMMENT.match(data) is not None
        if not self._begins_with_comment:
            return len(data) < MAX_FIRST_EVENT and not any(end in data for end in EVENT_ENDS)
        if self._data_at < 0:
            self._data_at = data.find(DATA_LINE, max(0, searched - len(DATA_LINE) + 1))
        start = self._data_at
        if start >= 0:
            is_short = len(data) - start < MAX_FIRST_EVENT
            return is_short and not any(data.find(end, start) >= 0 for end in EVENT_ENDS)
        if self._has_ended:
            message = "the engine ended its stream before it began an answer"
            raise UpstreamError("truncated", message)
        return len(data) < MAX_HELD_BYTES

    def _is_decisive(self, start: int) -> bool:
        data = self.data
        return (
            TOKEN_PATTERN.search(data, start) is not None
            or QUOTED_FINISH_REASON.search(data, start) is not None
            or data.find(DONE_MARKER, start) >= 0
            or self._has_ended
        )


class HeldNamedEvents(RetryableStart):
    """Holds back the beginning of a stream of named events, as in the Messages and Responses APIs.

    The first event that `grammar` counts as work of the engine ends the wait.
    """

    __slots__ = ("_grammar",)

    def __init__(self, grammar: EventGrammar) -> None:
        super().__init__()
        self._grammar = grammar

    def _find_error(self, start: int) -> int:
        first = self._grammar.first.search(self.data, start)
        if first is None or self._grammar.error.match(first[0]) is None:
            return -1
        return first.end()

    def _is_held_longer(self, searched: int) -> bool:
        start = max(0, searched - LONGEST_MATCH)
        has_begun = self._grammar.first.search(self.data, start) is not None
        if self._has_ended and not has_begun:
            raise UpstreamError(
                "truncated", "the engine ended its stream before it began an answer"
            )
        return len(self.data) < MAX_LEADING_ERROR and not has_begun
