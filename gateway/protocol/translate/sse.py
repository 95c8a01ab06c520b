"""Reads server-sent events from bytes in pieces of any size, and writes events as bytes."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.protocol.translate.chat_types import TranslationError
from gateway.protocol.translate.json_pieces import encode_in_pieces

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Maximum bytes of one event. It is large because engines repeat a whole request in some errors."""
_FIELD, _FIELD_BYTES = b"data:", len(b"data: ")


class EventReader:
    """Collects the data of server-sent events, whose lines end with LF or CRLF.

    Fields other than `data` are skipped. flush() returns a last event that no blank line ends.

    _data          the data of an incomplete event, with a line feed before each line
    _line          the beginning of an incomplete line, unless that line is known to be data
    _in_data_line  whether the incomplete line is a line of data
    """

    __slots__ = ("_data", "_in_data_line", "_limit", "_line")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        """Create a reader of events that have at most about `limit` bytes each."""
        self._limit = limit
        self._data, self._line = bytearray(), bytearray()
        self._in_data_line = False

    def feed(self, chunk: bytes) -> list[bytearray]:
        """Add received bytes, and return the data of the events that are complete now.

        Raises TranslationError if an event is too long.
        """
        *lines, rest = chunk.split(b"\n")
        events = []
        for line in lines:
            self._add(line, is_whole=True)
            if self._in_data_line:
                self._in_data_line = False
                if self._data.endswith(b"\r"):
                    del self._data[-1:]
                continue
            is_blank, self._line = not self._line or self._line == b"\r", bytearray()
            if is_blank and self._data:
                events.append(self._take())
        self._add(rest, is_whole=False)
        if max(len(self._data), len(self._line)) > self._limit:
            raise TranslationError(
                f"A server-sent event of the engine's answer is longer than {self._limit} bytes."
            )
        return events

    def flush(self) -> list[bytearray]:
        """Return the data of the last event of a stream if it lacks its final blank line.

        Call this at the end of the stream.
        """
        return self.feed(b"\n\n")

    def _add(self, text: bytes, *, is_whole: bool) -> None:
        # Add the next bytes of a line; `is_whole` if the line ends behind them.
        if self._in_data_line:
            self._data += text
            return
        self._line += text
        if (is_whole or len(self._line) >= _FIELD_BYTES) and self._line.startswith(_FIELD):
            start = len(_FIELD) + self._line.startswith(b" ", len(_FIELD))
            self._data += b"\n"
            self._data += memoryview(self._line)[start:]
            self._line, self._in_data_line = bytearray(), True

    def _take(self) -> bytearray:
        data, self._data = self._data, bytearray()
        del data[:1]
        return data


def format_event(name: str, data: object) -> Iterator[bytes]:
    """Yield the bytes of a server-sent event in pieces: its name, and `data` as JSON."""
    yield b"event: " + name.encode() + b"\ndata: "
    yield from encode_in_pieces(data)
    yield b"\n\n"
