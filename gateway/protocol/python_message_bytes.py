"""The functions of message_bytes.py in Python, with the results that the C form must have. No I/O.

Header bytes of a client that are not UTF-8 are surrogates in a str; they are sent unchanged.
"""

from __future__ import annotations

from array import array


def request_head(start: bytes, request_id: str, length: int, lines: str) -> bytes:
    """Return the head of a request to an engine.

    start   the request line and the header lines that do not depend on the request
    length  length of the body in bytes
    lines   further header lines, each ending in CRLF
    """
    head = f"x-request-id: {request_id}\r\ncontent-length: {length}\r\n{lines}\r\n"
    return start + head.encode("utf-8", "surrogateescape")


def response_lines(first: str, request_id: str, endpoint: str) -> bytes:
    """Return the header lines that the gateway adds to an engine's response, without its framing.

    `first` has the header lines to put before these, each ending in CRLF.
    """
    lines = (
        f"{first}x-request-id: {request_id}\r\nx-penstock-endpoint: {endpoint}\r\n"
        "cache-control: no-cache\r\nx-accel-buffering: no\r\n"
    )
    return lines.encode("utf-8", "surrogateescape")


def whole_response(start: bytes, lines: bytes, payload: bytes) -> bytes:
    """Return a response that is not streamed, with its length.

    start  the status line and the content type
    lines  further header lines, each ending in CRLF
    """
    return b"".join((start, lines, b"content-length: %d\r\n\r\n" % len(payload), payload))


def json_numbers(numbers: array[int]) -> bytes:
    """Return a JSON list of the numbers in an array of the type code "Q"."""
    return b"[%s]" % ",".join(map(str, numbers)).encode()
