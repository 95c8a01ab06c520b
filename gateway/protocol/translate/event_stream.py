"""Server-sent events: the data of each event from bytes in any pieces, and events as bytes."""

from __future__ import annotations

import msgspec

from gateway.protocol.translate.chat_answers import TranslationError

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Limit for one event; engines repeat a whole request in some errors."""

_encode = msgspec.json.Encoder().encode


class EventReader:
    """Collects the lines of events. Lines end with LF or CRLF; other fields than data are skipped.

    An event without its final blank line, at the end of a stream, is returned by flush().
    """

    __slots__ = ("_data", "_pending", "_size")

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that are complete now. Raises TranslationError."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > MAX_EVENT_BYTES:
            raise TranslationError("An event of the engine is too long.")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._add(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(self._take())
        return events

    def flush(self) -> list[bytes]:
        """Return the data of a last event that the end of the stream completes."""
        return self.feed(b"\n\n")

    def _add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_EVENT_BYTES:
            raise TranslationError("An event of the engine is too long.")
        self._data.append(data)

    def _take(self) -> bytes:
        data = b"\n".join(self._data)
        self._data, self._size = [], 0
        return data


def format_event(name: str, data: object) -> bytes:
    """Return a named event whose data is JSON."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"
