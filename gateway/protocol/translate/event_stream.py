"""Reads server-sent events from bytes that arrive in any pieces, and writes events as bytes."""

from __future__ import annotations

import msgspec

from gateway.protocol.translate.chat_answers import TranslationError

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Maximum bytes of one event. It is large because engines repeat a whole request in some errors."""

_encode = msgspec.json.Encoder().encode


class EventReader:
    """Collects the data of server-sent events from their lines, which end with LF or CRLF.

    Fields other than data are skipped. flush() returns a last event that lacks its final blank
    line. Each byte is searched once and copied a few times, however small the pieces are.

    _pending   the beginning of a line whose end has not arrived
    _data      the data of an event whose end has not arrived, a line feed before each line
    """

    __slots__ = ("_data", "_pending")

    def __init__(self) -> None:
        self._pending, self._data = bytearray(), bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add received bytes, and return the data of the events that are complete now.

        Raises TranslationError if an event is too long.
        """
        *lines, rest = chunk.split(b"\n")
        if lines and self._pending:
            lines[0] = bytes(self._pending) + lines[0]
            self._pending.clear()
        self._pending += rest
        if len(self._pending) > MAX_EVENT_BYTES:
            raise TranslationError("A server-sent event of the engine's answer is too long.")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._add(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(self._take())
        return events

    def flush(self) -> list[bytes]:
        """Return the data of the last event of a stream if it lacks its final blank line.

        Call it at the stream's end.
        """
        return self.feed(b"\n\n")

    def _add(self, data: bytes) -> None:
        self._data += b"\n"
        self._data += data
        if len(self._data) > MAX_EVENT_BYTES:
            raise TranslationError("A server-sent event of the engine's answer is too long.")

    def _take(self) -> bytes:
        data = bytes(memoryview(self._data)[1:])
        self._data = bytearray()
        return data


def format_event(name: str, data: object) -> bytes:
    """Return a server-sent event with this name, whose data is JSON."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"
