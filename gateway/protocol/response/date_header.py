"""Formats the Date header line of HTTP responses once a second, not for each response."""

from __future__ import annotations

from email.utils import formatdate
from typing import Protocol


class ResponseLines(Protocol):
    """The header lines that every response on a client connection gets, each ending in CRLF."""

    @property
    def line(self) -> str: ...


class ResponseClock:
    """Keeps the current Date header line of responses. Call update() several times a second.

    line  the header line with its CRLF; "" before the first update
    """

    __slots__ = ("_second", "line")

    def __init__(self) -> None:
        self._second = -1
        self.line = ""

    def update(self, unix_s: float) -> None:
        """Set the time for the Date header; `now` is in Unix seconds."""
        second = int(unix_s)
        if second != self._second:
            self._second = second
            self.line = f"date: {formatdate(second, usegmt=True)}\r\n"
