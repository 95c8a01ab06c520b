"""Reads a long event of a stream piece by piece, so that no read takes much time or memory. No I/O.

Engines send long events only for lists of token ids: those of a long prompt, or of many tokens
generated while the client read too slowly. Such a list is decoded as it arrives.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from gateway.protocol.upstream_error import UpstreamError

LONG_EVENT = 64 * 1024
"""Number of bytes from which an event is read piece by piece."""
MAX_EVENT_BYTES = 8 * 1024 * 1024
"""Maximum bytes of one event. The longest events contain the token ids of the prompt, about seven
bytes each."""
MAX_DECODED_BYTES = 256 * 1024
"""Maximum bytes of one event apart from its lists of token ids; these bytes are decoded at once."""
_SLICE = 64 * 1024  # bytes of ids that are decoded at once
_MAX_ID = 64  # bytes of one id, with the blanks around it
_LIST = re.compile(rb'"(prompt_token_ids|token_ids)": ?\[')
_LONGEST_MATCH = len(b'"prompt_token_ids": [')

_decode_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]).decode


class LongEvent:
    """One event of a stream, whose lists of token ids are extracted as they arrive.

    A list is recognised by its name. Text cannot match the name, because quotes in JSON strings are
    escaped.
    """

    __slots__ = ("_bytes", "_count", "_ids", "_kept", "_lists", "_max_ids", "_name", "_tail")

    def __init__(self, max_ids: int) -> None:
        """Create an empty event; if a list has over `max_ids` ids, only their number is kept."""
        self._max_ids = max_ids
        self._kept = bytearray()  # the event with empty lists
        self._tail = b""  # the end of the last piece, which may be part of a name or of an id
        self._name = ""  # the list that is being read; "" outside
        self._ids = array("I")
        self._count = self._bytes = 0
        self._lists: dict[str, Sequence[int]] = {}

    def add(self, piece: bytes) -> None:
        """Add the next bytes of the event. Raises UpstreamError if it is too long or malformed."""
        self._bytes += len(piece)
        if self._bytes > MAX_EVENT_BYTES:
            raise _too_long(MAX_EVENT_BYTES)
        for start in range(0, len(piece), _SLICE):
            text, self._tail = self._tail + piece[start : start + _SLICE], b""
            while text:
                text = self._read_list(text) if self._name else self._keep(text)
        if len(self._kept) > MAX_DECODED_BYTES:
            raise _too_long(MAX_DECODED_BYTES)

    def finish(self) -> tuple[bytes, Mapping[str, Sequence[int]]]:
        """Return the event's bytes with empty lists, and the token ids of each list by its name.

        If a list had too many ids, a range of the same length stands for it.
        """
        return bytes(self._kept) + self._tail, self._lists

    def _keep(self, text: bytes) -> bytes:
        # Keep bytes outside of a list; return those after the beginning of the next list.
        match = _LIST.search(text)
        if match is None:
            end = max(0, len(text) - _LONGEST_MATCH)
            self._kept += text[:end]
            self._tail = text[end:]
            return b""
        if match[1].decode() in self._lists:
            raise UpstreamError(
                "framing", f"the engine sent an event with two lists named '{match[1].decode()}'"
            )
        self._kept += text[: match.end()]
        self._name, self._ids, self._count = match[1].decode(), array("I"), 0
        return text[match.end() :]

    def _read_list(self, text: bytes) -> bytes:
        # Read the ids in `text`; return the bytes from the end of the list on, b"" without one.
        end = text.find(b"]")
        if end >= 0:
            if self._count or text[:end].strip():
                self._add_ids(text[:end])
            self._lists[self._name] = self._result()
            self._name = ""
            return text[end:]
        cut = text.rfind(b",")
        if len(text) - cut > _MAX_ID:
            raise UpstreamError(
                "framing", "the engine sent a list of token ids with values that are not integers"
            )
        if cut >= 0:
            self._add_ids(text[:cut])
        self._tail = text[cut + 1 :]
        return b""

    def _add_ids(self, text: bytes) -> None:
        # Add ids that are separated by commas; only count them beyond the maximum.
        number = text.count(b",") + 1
        self._count += number
        if self._count > self._max_ids:
            self._ids = array("I")
            return
        try:
            ids = _decode_ids(b"[%b]" % text)
        except msgspec.DecodeError as error:
            raise UpstreamError(
                "framing", f"the engine sent malformed token ids: {error}"
            ) from None
        if len(ids) != number:
            raise UpstreamError(
                "framing",
                "the engine sent token ids that are not a list of integers separated by commas",
            )
        self._ids.extend(ids)

    def _result(self) -> Sequence[int]:
        return self._ids if self._count <= self._max_ids else range(self._count)


def first_event_length(text: bytes) -> int:
    """Return the length of the first event in `text` with its blank line; 0 if incomplete."""
    if text.find(b"\n") < 0:  # fifty times faster than to search for two bytes
        return 0
    lf, crlf = text.find(b"\n\n"), text.find(b"\n\r\n")
    return min((at + size for at, size in ((lf, 2), (crlf, 3)) if at >= 0), default=0)


def _too_long(limit: int) -> UpstreamError:
    return UpstreamError("framing", f"the engine sent an event of more than {limit} bytes")
