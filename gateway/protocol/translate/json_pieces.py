"""Encodes values with long texts as JSON in small pieces. No I/O.

Encoding a text of megabytes at once would take several buffers of that size. Allocating these is
slow, because the system provides new memory page by page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

PIECE_CHARS = 8 * 1024
"""Number of characters from which on a text is long, and that are encoded at once."""
_PARTS_AT_ONCE = 256
_MARK = b"\xff"  # stands for a long text; no JSON text in UTF-8 contains this byte
_RAW_MARK = msgspec.Raw(_MARK)

_encode = msgspec.json.Encoder().encode


class LongText:
    """A string in several parts, which is encoded as one JSON string."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def encode(self) -> Iterator[bytes]:
        """Yield the JSON string in pieces of at most PIECE_CHARS characters."""
        yield b'"'
        for first in range(0, len(self._parts), _PARTS_AT_ONCE):
            text = "".join(self._parts[first : first + _PARTS_AT_ONCE])
            for start in range(0, len(text), PIECE_CHARS):
                yield _encode(text[start : start + PIECE_CHARS])[1:-1]
        yield b'"'


Text = str | LongText
"""A text as a member of a value for encode_in_pieces()."""


def to_text(parts: Sequence[str]) -> Text:
    """Return the joined parts as a string, or as a LongText if they are long."""
    if len(parts) <= _PARTS_AT_ONCE and sum(map(len, parts)) <= PIECE_CHARS:
        return "".join(parts)
    return LongText(parts)


def encode_in_pieces(value: object) -> Iterator[bytes]:
    """Yield the JSON text of plain data (dicts, lists, strings, numbers, LongText) in pieces."""
    texts: list[LongText] = []

    def mark(unknown: object) -> msgspec.Raw:
        if not isinstance(unknown, LongText):
            raise TypeError(f"cannot encode {type(unknown).__name__} as JSON")
        texts.append(unknown)
        return _RAW_MARK

    text = msgspec.json.encode(value, enc_hook=mark)
    if not texts:
        yield text
        return
    first, *others = text.split(_MARK)
    yield first
    for long, following in zip(texts, others, strict=True):
        yield from long.encode()
        yield following
