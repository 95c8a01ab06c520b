"""The searches of byte_scan.py in Python, with the results that the C form must have. No I/O."""

from __future__ import annotations

import re

USAGE = b'"usage":'
DONE_MARKER = b"[DONE]"
ERROR_NAME = b'"error"'
EVENT_MARKER = b"\ndata:"
CHUNK_SIZES = {b"%x" % size: size for size in range(1, 4096)}
"""Sizes of HTTP chunks by their text, as engines usually write them."""
SIZE_LINES = {len(line) + size + 4: line + b"\r\n" for line, size in CHUNK_SIZES.items()}
"""The size lines of HTTP chunks by the length of the whole chunk."""

_DIGITS = re.compile(rb"0|[1-9][0-9]{0,8}")
_CHUNK_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
_EVENT_STARTS = {length: line + b"data:" for length, line in SIZE_LINES.items()}
"""The first bytes of HTTP chunks that begin with an event, by the length of the whole chunk."""


def body_span(data: bytes, offset: int, before: bytes, after: bytes) -> tuple[int, int] | None:
    """Find the body of the HTTP message at `offset` in `data`, if its head has an expected form.

    The head must be `before`, the digits of the Content-Length, and `after`. Returns the offsets at
    which the body begins and ends, or None for any other head. The body may extend beyond `data`.
    """
    # Comparing a slice takes fewer instructions than startswith() with an offset.
    digits_at = offset + len(before)
    if data[offset:digits_at] != before:
        return None
    digits = _DIGITS.match(data, digits_at)
    if digits is None or not data.startswith(after, digits.end()):
        return None
    start = digits.end() + len(after)
    return start, start + int(digits[0])


def whole_body(data: bytes, before: bytes, after: bytes) -> bytes | None:
    """Return the body of an HTTP message, if `data` is exactly one message with the expected head.

    The head must be `before`, the digits of the Content-Length, and `after`. Returns None for
    another head, for a part of a message, and for bytes beyond its end.
    """
    head, _, body = data.partition(after)
    return body if head == b"%b%d" % (before, len(body)) else None


def around_value(
    text: bytes, name: bytes, length: int, most_before: int, most: int
) -> tuple[bytes, bytes] | None:
    """Split the JSON text of an object at a member's value; return the bytes around the value.

    The first part of the result includes the first byte of the value.

    name         the member's name with its quotes and colon, directly followed by the value
    length       number of bytes of the value
    most_before  number of bytes at the start of `text` that must contain the name
    most         maximum number of bytes of `text` without the value

    Returns None if the name is not found, or if the text is too long.
    """
    # partition() takes half as long as find(), whose offsets are parsed like a format string.
    before, found, _ = text[:most_before].partition(name)
    if not found or len(text) - length > most:
        return None
    start = len(before) + len(name)
    return text[: start + 1], text[start + length :]


def has_error_name(text: bytes, start: int, length: int) -> bool:
    """Return whether the JSON name "error" occurs in `length` bytes of `text` from `start` on."""
    return bool(text[start : start + length].partition(ERROR_NAME)[1])


def count_events(data: bytes, finish_reason: bytes) -> int:
    """Return the number of server-sent events in `data` if they need no further parsing, else 0.

    `data` must be exactly one HTTP chunk of complete events. None of them may contain token counts,
    a finish reason, an error or [DONE].

    finish_reason  the bytes that precede a finish reason in this stream

    The C form also accepts several chunks.
    """
    start = _EVENT_STARTS.get(len(data))
    if (
        start is None
        or not data.startswith(start)
        or not data.endswith(_CHUNK_ENDS)
        # find(), because `in` first tries bytes as an int, at the cost of an exception
        or data.find(USAGE) >= 0
        or data.find(finish_reason) >= 0
        or data.find(ERROR_NAME) >= 0
        or data.find(DONE_MARKER) >= 0
    ):
        return 0
    return data.count(EVENT_MARKER)  # the first one follows the size line


def finish_reason(text: bytes) -> str | None:
    """Return the last finish reason in `text`; None if the caller has to search for it.

    The C form recognises frequent reasons. This form always returns None.
    """
    return None


def usage_counts(text: bytes) -> tuple[int | None, int | None, int | None] | None:
    """Return the token counts of the last `usage` member in `text`; None if the caller has to read
    it.

    The counts are the tokens of the prompt, of the answer, and of the cached part of the prompt.
    The C form reads counts that are plain numbers. This form always returns None.
    """
    return None
