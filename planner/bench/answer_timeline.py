"""Parses a streamed answer, and records the times of its tokens, its token usage and its end.

This module does no I/O.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct):
    """The numbers of tokens that an engine reports with an answer.

    `cached_tokens` is None if the engine does not report it.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: ReportedUsage | None = None
    error: dict[str, Any] | str | None = None


_DECODER = msgspec.json.Decoder(_Event)
_MOST_LINE_BYTES = 16 << 20
"""Maximum bytes of a line of a stream.

A longer line cannot be an event of an answer and is dropped before it fills the memory.
"""


class AnswerTimeline:
    """Parses the received bytes of one streamed answer, and records the times of its tokens.

    first_s  time of the first event with generated content; None: not yet
    last_s   time of the latest event with generated content; None: not yet
    gaps_s   seconds between these events
    usage    the latest token usage that was reported
    done     whether [DONE] was received
    error    code of an error event, or its type if it has no code
    broken   whether invalid data was received: no JSON, or a line that does not end
    """

    __slots__ = (
        "_buffer",
        "_data",
        "_pieces",
        "broken",
        "done",
        "error",
        "first_s",
        "gaps_s",
        "last_s",
        "usage",
    )

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []
        self._pieces: list[str] = []
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.gaps_s: list[float] = []
        self.usage: ReportedUsage | None = None
        self.done = False
        self.broken = False
        self.error: str | None = None

    @property
    def text(self) -> str:
        """Return the generated text of the answer, without reasoning and tool calls."""
        return "".join(self._pieces)

    @property
    def tokens(self) -> int:
        """Return the number of generated tokens: as the engine reports, or one per event with
        content.
        """
        if self.usage is not None:
            return self.usage.completion_tokens
        return 0 if self.first_s is None else len(self.gaps_s) + 1

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse the next bytes of the streamed answer, which arrived at `now_s`.

        Chunks may have any size. Lines end with a line feed, with or without a carriage return
        before it.
        """
        *lines, rest = data.split(b"\n")
        if lines and self._buffer:
            lines[0] = bytes(self._buffer) + lines[0]
            self._buffer.clear()
        self._buffer += rest
        if len(self._buffer) > _MOST_LINE_BYTES:
            self._buffer.clear()
            self.broken = True
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                self._on_event(b"\n".join(self._data), now_s)
                self._data.clear()

    def _on_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.broken = True
            return
        if event.usage is not None:
            self.usage = event.usage
        if isinstance(event.error, dict):
            self.error = str(event.error.get("code") or event.error.get("type") or "error")
        elif event.error is not None:
            self.error = event.error or "error"
        generated = [choice for choice in event.choices if self._has_content(choice)]
        if generated:
            self._on_token(now_s)

    def _has_content(self, choice: _Choice) -> bool:
        # Return whether a choice has generated content, and store its text.
        #
        # A role alone, or an empty final delta, is not content.
        delta = choice.delta or _Delta()
        answer = delta.content or choice.text
        if answer:
            self._pieces.append(answer)
        return bool(answer or delta.reasoning_content or delta.reasoning or delta.tool_calls)

    def _on_token(self, now_s: float) -> None:
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
