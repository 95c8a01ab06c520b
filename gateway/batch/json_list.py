"""Splits the text of a JSON object with one long list into the items of the list. No I/O.

A JSON decoder holds the GIL until it has read the whole text. This search handles 64 KiB at a time,
so other threads can run before it is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

WINDOW_BYTES = 64 * 1024
_SPACE = re.compile(rb"[ \t\r\n]*")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = re.compile(rb'(?:[^"\[\]{}]++|%b)*+' % _STRING, re.DOTALL)
"""Any number of whole strings, and of other characters than brackets."""
_SCALAR = re.compile(rb'[^,"\[\]{} \t\r\n]*')
_OPENING = b"[{"


class JsonListError(ValueError):
    """Raised for a text that is not a JSON object with one list; the message says why."""


class JsonList:
    """The items of the only list in a JSON object, found without decoding the whole text.

    Only the text around and between the items is checked. The items themselves may be invalid
    JSON, which the caller notices when it decodes them.
    """

    def __init__(self, text: bytes | bytearray, name: str) -> None:
        """Prepare to search the JSON object `text` for the list that is its member `name`."""
        self._text, self._name = text, name

    def items(self) -> Iterator[bytes]:
        """Yield the text of each item; raise JsonListError at the first malformed place."""
        at = self._start()
        if self._text[at : at + 1] == b"]":
            self._finish(at + 1)
            return
        view = memoryview(self._text)
        while True:
            end = self._value_end(at)
            yield bytes(view[at:end])
            end = self._beyond(_SPACE, end)
            mark = self._text[end : end + 1]
            if mark == b"]":
                self._finish(end + 1)
                return
            if mark != b",":
                raise self._malformed("a list item must be followed by ',' or ']'", end)
            at = self._beyond(_SPACE, end + 1)

    def _start(self) -> int:
        # Return where the first item, or the end of the list, is.
        at = self._expect(b"{", self._beyond(_SPACE, 0))
        if self._text[at : at + 1] == b"}":
            raise JsonListError(f"the member '{self._name}' is missing")
        end = self._value_end(at)
        if self._text[at:end] != b'"%b"' % self._name.encode():
            raise JsonListError(f"the only member that is permitted is '{self._name}'")
        at = self._expect(b":", self._beyond(_SPACE, end))
        if self._text[at : at + 1] not in (b"[", b""):
            raise JsonListError(f"'{self._name}' must be a list")
        return self._expect(b"[", at)

    def _finish(self, at: int) -> None:
        # Check what follows the list.
        at = self._beyond(_SPACE, at)
        if self._text[at : at + 1] == b",":
            raise JsonListError(f"the only member that is permitted is '{self._name}'")
        at = self._expect(b"}", at)
        if at < len(self._text):
            raise self._malformed("there is text after the end of the object", at)

    def _expect(self, mark: bytes, at: int) -> int:
        # Return where the next token after `mark` begins; `mark` must be at this offset.
        if self._text[at : at + 1] != mark:
            raise self._malformed(f"expected '{mark.decode()}'", at)
        return self._beyond(_SPACE, at + 1)

    def _value_end(self, at: int) -> int:
        first = self._text[at : at + 1]
        if first == b'"':
            return self._string_end(at)
        if not first or first not in _OPENING:
            end = self._beyond(_SCALAR, at)
            if end == at:
                raise self._malformed("a value is missing", at)
            return end
        depth = 0
        while True:
            at = self._beyond(_FLAT, at)
            mark = self._text[at : at + 1]
            if mark == b'"':  # the string does not end within the window
                at = self._string_end(at)
                continue
            if not mark:
                raise self._malformed("the text ends within an object or a list", at)
            depth += 1 if mark in _OPENING else -1
            at += 1
            if not depth:
                return at

    def _string_end(self, at: int) -> int:
        end = self._beyond(_IN_STRING, at + 1)
        if self._text[end : end + 1] != b'"':
            raise self._malformed("the text ends within a string", end)
        return end + 1

    def _beyond(self, pattern: re.Pattern[bytes], at: int) -> int:
        # Return the end of the text from `at` on that the pattern matches, window by window.
        while True:
            found = pattern.match(self._text, at, at + WINDOW_BYTES)
            end = at if found is None else found.end()
            # A match also ends before a backslash whose character is beyond the window.
            if end == at or end < at + WINDOW_BYTES - 1:
                return end
            at = end

    def _malformed(self, what: str, at: int) -> JsonListError:
        return JsonListError(f"it is not valid JSON: {what} (byte {at})")
