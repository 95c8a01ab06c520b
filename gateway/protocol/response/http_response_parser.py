"""Parses HTTP/1.1 responses without I/O: the head, and the payload of the body.

The parser is strict where two parsers could disagree about the end of a body.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

import msgspec
from msgspec.structs import replace

from gateway.protocol.byte_scan import body_span, whole_body
from gateway.protocol.python_byte_scan import CHUNK_SIZES, SIZE_LINES
from gateway.protocol.response import engine_retry_after

MAX_HEAD_BYTES = 64 * 1024
HEAD_END = b"\r\n\r\n"
MAX_SIZE_LINE = 288
MAX_TRAILER_BYTES = 4096  # small, because an unfinished trailer is searched at every read
LAST_CHUNK = b"0\r\n\r\n"
BODILESS = (204, 304)  # statuses without a body, whatever their headers announce

_FIELDS = re.compile(
    rb"\n(content-type|content-length|content-encoding|transfer-encoding|connection)"
    rb"[ \t]*:([^\r\n]*)\r"
)
_LENGTH = re.compile(rb"[1-9][0-9]{0,8}")
_LENGTH_LINE = re.compile(rb"\r\ncontent-length: ?([1-9][0-9]{0,8})\r\n", re.IGNORECASE)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ONCE = frozenset((b"content-length", b"content-encoding", b"transfer-encoding"))

# CHUNK_SIZES has chunk sizes as engines usually write them; this parses any other form.
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]{0,8};[^\r\n]{0,256})?\r\n")


class FramingError(Exception):
    """Raised when bytes are not a valid HTTP/1.1 response; the message names the broken rule."""


class ResponseHead(msgspec.Struct, frozen=True):
    """The properties of a response head that the gateway needs.

    length       Content-Length; None for chunked bodies, and bodies that end with the connection
    keep_alive   whether the connection can carry another response after this one
    is_html      whether it is a 2xx with a web page, which no API of an engine sends
    is_json      whether it is a 2xx with a JSON document
    is_plain     whether it is a 2xx with a body of known, nonzero length that is neither an event
                 stream nor a web page
    head_start   the start of the gateway's own head: status 200 and the engine's content type
    length_line  the end of the gateway's own head if the body keeps its length
    wait_s       seconds after which the client may retry a 429 or 503 (Retry-After); None if the
                 head does not say. A date there counts from the head's own Date
    """

    status: int
    content_type: bytes
    length: int | None
    is_chunked: bool
    keep_alive: bool
    is_sse: bool
    is_html: bool
    is_json: bool
    is_plain: bool
    head_start: bytes
    length_line: bytes
    wait_s: float | None = None


# The cache helps because most heads of an engine are equal until their date changes.
@lru_cache(maxsize=64)
def parse_head(head: bytes) -> ResponseHead:
    """Parse a response head: status line and header fields, ending in one CRLF.

    Raises FramingError if it is malformed or ambiguous.
    """
    if not (head.startswith(b"HTTP/1.") and head[9:12].isdigit()):
        raise FramingError("the engine's response does not begin with an HTTP/1.x status line")
    pairs = [(name, value.strip(b" \t")) for name, value in _FIELDS.findall(head.lower())]
    fields = dict(pairs)
    _check_body_length(pairs, fields)
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    status, size = int(head[9:12]), None if length is None else int(length)
    is_success = 200 <= status < 300
    if is_success and fields.get(b"content-encoding", b"identity") != b"identity":
        raise FramingError("the engine's response has a Content-Encoding that was not requested")
    content_type = fields.get(b"content-type", b"application/octet-stream")
    if _CONTROL.search(content_type):  # the value is copied into the gateway's own head
        raise FramingError("the Content-Type of the engine's response contains control characters")
    is_sse = content_type.startswith(b"text/event-stream")
    is_html = is_success and content_type.startswith(b"text/html")
    framed = size is not None or coding is not None or status in BODILESS
    options = b",".join(value for name, value in pairs if name == b"connection")
    closes = b"close" in [option.strip(b" \t") for option in options.split(b",")]
    return ResponseHead(
        status,
        content_type,
        size,
        coding is not None,
        framed and not closes and head[7] == ord("1"),
        is_sse,
        is_html,
        is_success and content_type.startswith(b"application/json"),
        bool(size) and is_success and status not in BODILESS and not (is_sse or is_html),
        b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % content_type,
        b"content-length: %d\r\n\r\n" % (size or 0),
        engine_retry_after.read_wait_s(head) if status in engine_retry_after.STATUSES else None,
    )


def _check_body_length(pairs: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> None:
    # Raise FramingError if the header fields leave it ambiguous where the body ends.
    once = [name for name, _ in pairs if name in _ONCE]
    if len(set(once)) != len(once):
        raise FramingError(
            "the engine's response has Content-Length, Content-Encoding or Transfer-Encoding twice"
        )
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    if coding is not None and coding != b"chunked":
        raise FramingError("the engine's response has a Transfer-Encoding other than 'chunked'")
    if coding is not None and length is not None:
        raise FramingError("the engine's response has both Transfer-Encoding and Content-Length")
    if length is not None and (not length.isdigit() or len(length) > 15):
        raise FramingError("the Content-Length of the engine's response is not a single number")


class ResponseHeadReader:
    """Reads response heads; parses a head only if it differs from the previous one.

    While the second in `Date` stays the same, the heads of an engine differ only in their
    Content-Length, which is allowed to differ.
    """

    __slots__ = ("_after", "_before", "_head")

    def __init__(self) -> None:
        self._head: ResponseHead | None = None
        self._before = self._after = b""

    def read_whole(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """Return the head and payload of a response that arrived alone and complete in one read.

        Returns None unless `data` is exactly one plain response whose head equals the last one,
        except for its length. The returned head may still have the length of an earlier response.
        """
        head = self._head
        if head is None or not head.is_plain:
            return None
        payload = whole_body(data, self._before, self._after)
        return (head, payload) if payload else None

    def read(self, data: bytes, offset: int) -> tuple[ResponseHead, int] | None:
        """Return the response head at `offset` and its body's offset; None if incomplete.

        Raises FramingError if the head is malformed, ambiguous or too long.
        """
        head = self._head
        if head is not None:
            if head.length is None:
                if data.startswith(self._before, offset):
                    return head, offset + len(self._before)
            elif (span := body_span(data, offset, self._before, self._after)) is not None:
                start, end = span
                if end > start:
                    return self._with_length(head, end - start), start
        end = data.find(HEAD_END, offset, offset + MAX_HEAD_BYTES)
        if end < 0:
            if len(data) - offset >= MAX_HEAD_BYTES:
                raise FramingError(
                    f"the engine's response head is longer than {MAX_HEAD_BYTES} bytes"
                )
            return None
        text = data[offset : end + 2]
        head = parse_head(text)
        if head.is_plain or head.is_sse:
            self._remember(head, text + b"\r\n")
        return head, end + 4

    def _remember(self, head: ResponseHead, text: bytes) -> None:
        length = _LENGTH_LINE.search(text)
        if length is not None:
            self._head, self._before, self._after = (
                head,
                text[: length.start(1)],
                text[length.end(1) :],
            )
        elif head.length is None:
            self._head, self._before, self._after = head, text, b""

    def _with_length(self, head: ResponseHead, length: int) -> ResponseHead:
        if length == head.length:
            return head
        line = b"content-length: %d\r\n\r\n" % length
        self._head = head = replace(head, length=length, length_line=line)
        return head


class ResponseBody(Protocol):
    """The interface of a parser of response bodies: feed() returns the payload in received bytes.

    is_complete        whether the end of the body has been received
    at_chunk_boundary  whether the gateway could insert its own chunk here, in place of the bytes in
                       `partial`
    was_at_boundary    value of at_chunk_boundary before the newest bytes
    partial            an incomplete size line or CRLF, kept until the rest of it arrives
    surplus_bytes      number of bytes received after the end
    last_chunk_offset  where the last chunk begins: an offset in the previous `partial` followed by
                       the newest data
    has_trailers       whether the last chunk has trailer fields
    """

    is_complete: bool
    was_at_boundary: bool
    surplus_bytes: int
    has_trailers: bool
    last_chunk_offset: int
    partial: bytes

    @property
    def at_chunk_boundary(self) -> bool: ...
    def feed(self, data: bytes) -> bytes: ...


class ChunkedBody:
    """An HTTP body with Transfer-Encoding: chunked. It may arrive in pieces of any size.

    expects_size  whether the size line of a chunk comes next
    """

    __slots__ = (
        "_expects_crlf",
        "_missing",
        "expects_size",
        "has_trailers",
        "is_complete",
        "last_chunk_offset",
        "partial",
        "surplus_bytes",
        "was_at_boundary",
    )

    def __init__(self) -> None:
        self.is_complete = self.has_trailers = False
        self.was_at_boundary = True
        self.surplus_bytes = 0
        self.last_chunk_offset = -1
        self.expects_size = True  # true if none of the following three is pending
        self._missing = 0  # payload bytes missing from the current chunk
        self._expects_crlf = False
        self.partial = b""

    @property
    def at_chunk_boundary(self) -> bool:
        return not (self._missing or self._expects_crlf)

    def feed(self, data: bytes) -> bytes:
        return self.match_whole_chunk(data) or self._feed(data)

    def match_whole_chunk(self, data: bytes) -> bytes:
        """Return the payload if `data` is exactly one HTTP chunk that begins here, else b"".

        A token of a stream usually arrives in this form. Except was_at_boundary, the state of the
        body does not change.
        """
        # The length of `data` determines the size line, so it is compared and not parsed.
        line = SIZE_LINES.get(len(data))
        if (
            line is not None
            and self.expects_size
            and data.startswith(line)
            and data.endswith(b"\r\n")
        ):
            self.was_at_boundary = True
            return data[len(line) : -2]
        return b""

    def _feed(self, data: bytes) -> bytes:
        self.was_at_boundary = self.at_chunk_boundary
        pieces: list[bytes] = []
        if self.partial:
            data, self.partial = self.partial + data, b""
        offset, end = 0, len(data)
        while offset < end and not self.is_complete:
            if self._missing:
                piece = data[offset : offset + self._missing]
                pieces.append(piece)
                offset += len(piece)
                self._missing -= len(piece)
                self._expects_crlf = not self._missing
            elif self._expects_crlf:
                offset = self._parse_crlf(data, offset)
            else:
                offset = _whole_chunks(data, offset, pieces)
                if offset < end:
                    offset = self._parse_size_line(data, offset)
        self.surplus_bytes = end - offset if self.is_complete else 0
        self.expects_size = not (self._missing or self._expects_crlf or self.partial)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _parse_crlf(self, data: bytes, offset: int) -> int:
        if data.startswith(b"\r\n", offset):
            self._expects_crlf = False
            return offset + 2
        if data[offset:] != b"\r":
            raise FramingError("a chunk of the engine's response is not followed by CRLF")
        self.partial = b"\r"
        return len(data)

    def _parse_size_line(self, data: bytes, offset: int) -> int:
        line = _SIZE.match(data, offset)
        if line is None:
            message = "a chunk size line of the engine's response is malformed"
            return self._keep_partial(data, offset, MAX_SIZE_LINE, message)
        self._missing = int(line[1], 16)
        if self._missing:
            return line.end()
        if data.startswith(b"\r\n", line.end()):
            stop = line.end() + 2
        else:
            stop = data.find(b"\r\n\r\n", line.end()) + 4
            if stop == 3:
                return self._keep_partial(data, offset, MAX_TRAILER_BYTES, "trailers without end")
            self.has_trailers = True
        self.is_complete = True
        self.last_chunk_offset = offset
        return stop

    def _keep_partial(self, data: bytes, offset: int, limit: int, problem: str) -> int:
        partial = data[offset:]
        if len(partial) > limit or (limit == MAX_SIZE_LINE and b"\r\n" in partial):
            raise FramingError(problem)
        self.partial = partial
        return len(data)


def _whole_chunks(data: bytes, offset: int, pieces: list[bytes]) -> int:
    # Append the payloads of the complete small chunks at `offset` to `pieces`.
    #
    # Return the offset at which these chunks end.
    while (line_end := data.find(b"\r\n", offset + 1, offset + 5)) > 0:
        size = CHUNK_SIZES.get(data[offset:line_end])
        if size is None or not data.startswith(b"\r\n", line_end + 2 + size):
            break
        pieces.append(data[line_end + 2 : line_end + 2 + size])
        offset = line_end + size + 4
    return offset


class LengthBody:
    """A response body whose length the header Content-Length gives."""

    __slots__ = (
        "_remaining",
        "has_trailers",
        "is_complete",
        "last_chunk_offset",
        "partial",
        "surplus_bytes",
    )
    at_chunk_boundary = was_at_boundary = False

    def __init__(self, length: int) -> None:
        self._remaining = length
        self.partial = b""
        self.has_trailers = False
        self.is_complete = length == 0
        self.surplus_bytes = 0
        self.last_chunk_offset = -1

    def feed(self, data: bytes) -> bytes:
        self._remaining -= len(data)
        self.is_complete = self._remaining <= 0
        if self._remaining < 0:
            self.surplus_bytes = -self._remaining
            return data[: self._remaining]
        return data


class RawBody:
    """An HTTP body that ends when the connection closes. A body that was cut off looks complete."""

    __slots__ = ("has_trailers", "is_complete", "last_chunk_offset", "partial", "surplus_bytes")
    at_chunk_boundary = was_at_boundary = True

    def __init__(self) -> None:
        self.partial = b""
        self.is_complete = self.has_trailers = False
        self.surplus_bytes = 0
        self.last_chunk_offset = -1

    def feed(self, data: bytes) -> bytes:
        return data


COMPLETE: ResponseBody = LengthBody(0)  # a body that arrived with its head; never fed
NOT_STARTED: ResponseBody = RawBody()  # the body while the head is still to come; never fed


def new_body(head: ResponseHead) -> ChunkedBody | LengthBody | RawBody:
    """Return the body parser (chunked, by length, or until close) for a response with this head."""
    if head.status in BODILESS:
        return LengthBody(0)
    if head.is_chunked:
        return ChunkedBody()
    return RawBody() if head.length is None else LengthBody(head.length)


def encode_chunk(payload: bytes) -> bytes:
    """Return `payload` as one HTTP chunk.

    Returns b"" for an empty payload, because an empty chunk would end the body.
    """
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
