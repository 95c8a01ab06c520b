"""HTTP/1.1 answer framing, sans-IO: the head's few facts, and bodies that hand out their payload as bytes arrive.

Strict where looseness would let two readers see different ends of one body (faults.md A01).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

import msgspec

MAX_HEAD = 64 * 1024
MAX_SIZE_LINE = 288
LAST_CHUNK = b"0\r\n\r\n"
BODILESS = (204, 304)  # whatever their headers say

_FACTS = re.compile(
    rb"\n(content-type|content-length|content-encoding|transfer-encoding|connection)[ \t]*:([^\r\n]*)\r"
)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ONCE = frozenset((b"content-length", b"content-encoding", b"transfer-encoding"))
_SIZES = {
    b"%x" % size: size for size in range(1, 4096)
}  # as engines write them; whatever else there is: _SIZE
_LINES = {
    len(line) + size + 4: line + b"\r\n" for line, size in _SIZES.items()
}  # by the length of the whole chunk
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]{0,8};[^\r\n]{0,256})?\r\n")


class FramingError(Exception):
    """The bytes are not an HTTP/1.1 answer. The message says which rule they break."""


class Head(msgspec.Struct, frozen=True):
    """What the gateway needs of a response head. `length` is None for chunked and close-delimited bodies.

    keep_alive  another answer may follow on its connection: this one has an end of its own
    plain   2xx with a body of a known length that is no event stream
    start   the first lines of our own answer: 200 and the engine's content type
    sized   the last line of our own head where the body keeps its length
    """

    status: int
    content_type: bytes
    length: int | None
    chunked: bool
    keep_alive: bool
    is_sse: bool
    plain: bool
    start: bytes
    sized: bytes


@lru_cache(
    maxsize=64
)  # of one engine most heads are equal for a second at least: the date is in them
def parse_head(head: bytes) -> Head:
    """A head (status line and headers, ending in one CRLF) to its facts. Raises FramingError."""
    if not (head.startswith(b"HTTP/1.") and head[9:12].isdigit()):
        raise FramingError("not an HTTP/1.x status line")
    found = [(name, value.strip(b" \t")) for name, value in _FACTS.findall(head.lower())]
    facts, once = dict(found), [name for name, _ in found if name in _ONCE]
    if len(set(once)) != len(once):
        raise FramingError("a framing header appears twice")
    length, coding = facts.get(b"content-length"), facts.get(b"transfer-encoding")
    if coding is not None and (coding != b"chunked" or length is not None):
        raise FramingError("Transfer-Encoding is not chunked alone")
    if length is not None and (not length.isdigit() or len(length) > 15):
        raise FramingError("Content-Length is not one number")
    status, size = int(head[9:12]), None if length is None else int(length)
    if 200 <= status < 300 and facts.get(b"content-encoding", b"identity") != b"identity":
        raise FramingError("the body is encoded, which nobody asked for")
    content_type = facts.get(b"content-type", b"application/octet-stream")
    if _CONTROL.search(content_type):  # it is copied into our own head
        raise FramingError("Content-Type has control characters")
    is_sse = content_type.startswith(b"text/event-stream")
    framed = size is not None or coding is not None or status in BODILESS
    said = b",".join(value for name, value in found if name == b"connection")
    closes = b"close" in [each.strip(b" \t") for each in said.split(b",")]
    return Head(
        status,
        content_type,
        size,
        coding is not None,
        framed and not closes and head[7] == ord("1"),
        is_sse,
        bool(size) and 200 <= status < 300 and status not in BODILESS and not is_sse,
        b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % content_type,
        b"content-length: %d\r\n\r\n" % (size or 0),
    )


class Body(Protocol):
    """A body being received. feed() hands out the payload inside the bytes; `ended` says that it was complete.

    between is True where another chunk could be written in place of an unfinished size line, `partial`; surplus counts
    bytes past the end. last_chunk is where the terminal chunk begins, in what was `partial` and the bytes fed last, and
    trailers says that there is more behind it than an end. rested is what `between` was before what makes no sense.
    """

    ended: bool
    rested: bool
    surplus: int
    trailers: bool
    last_chunk: int
    partial: bytes

    @property
    def between(self) -> bool: ...
    def feed(self, data: bytes) -> bytes: ...


class ChunkedBody:
    """Follows Transfer-Encoding: chunked through any splitting of the bytes."""

    __slots__ = (
        "_clean",
        "_crlf_due",
        "_need",
        "ended",
        "last_chunk",
        "partial",
        "rested",
        "surplus",
        "trailers",
    )

    def __init__(self) -> None:
        self.ended = self.trailers = False
        self.rested = True
        self.surplus = 0
        self.last_chunk = -1
        self._clean = True  # a size line is next: none of the three below is pending
        self._need = 0  # payload bytes missing from the current chunk
        self._crlf_due = False
        self.partial = b""  # an unfinished size line or CRLF

    @property
    def between(self) -> bool:
        return not (self._need or self._crlf_due)

    def whole(self, data: bytes) -> int:
        """Where the payload begins, if these bytes are exactly one whole chunk: what a token looks like. Else 0."""
        line = _LINES.get(len(data))
        if line is not None and data.startswith(line) and data.endswith(b"\r\n") and self._clean:
            return len(line)
        return 0

    def feed(self, data: bytes) -> bytes:
        at = self.whole(data)
        return data[at:-2] if at else self._feed(data)

    def _feed(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        if self.partial:
            data, self.partial = self.partial + data, b""
        at, end = 0, len(data)
        while at < end and not self.ended:
            if self._need:
                piece = data[at : at + self._need]
                pieces.append(piece)
                at += len(piece)
                self._need -= len(piece)
                self._crlf_due = not self._need
            elif self._crlf_due:
                at = self._crlf(data, at)
            else:
                at = _whole_chunks(data, at, pieces)
                if at < end:
                    at = self._size(data, at)
        self.surplus = end - at if self.ended else 0
        self._clean = not (self._need or self._crlf_due or self.partial)
        self.rested = self.between
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _crlf(self, data: bytes, at: int) -> int:
        if data.startswith(b"\r\n", at):
            self._crlf_due = False
            return at + 2
        if data[at:] != b"\r":
            raise FramingError("chunk is not followed by CRLF")
        self.partial = b"\r"
        return len(data)

    def _size(self, data: bytes, at: int) -> int:
        line = _SIZE.match(data, at)
        if line is None:
            return self._wait(data, at, MAX_SIZE_LINE, "bad chunk size line")
        self._need = int(line[1], 16)
        if self._need:
            return line.end()
        if data.startswith(b"\r\n", line.end()):
            stop = line.end() + 2
        else:
            stop = data.find(b"\r\n\r\n", line.end()) + 4
            if stop == 3:
                return self._wait(data, at, MAX_HEAD, "trailers without end")
            self.trailers = True
        self.ended = True
        self.last_chunk = at
        return stop

    def _wait(self, data: bytes, at: int, limit: int, problem: str) -> int:
        rest = data[at:]
        if len(rest) > limit or (limit == MAX_SIZE_LINE and b"\r\n" in rest):
            raise FramingError(problem)
        self.partial = rest
        return len(data)


def _whole_chunks(data: bytes, at: int, pieces: list[bytes]) -> int:
    """Takes the chunks that lie whole in the bytes from `at` on, as a burst of tokens does; where it had to stop."""
    while (line := data.find(b"\r\n", at + 1, at + 5)) > 0:
        size = _SIZES.get(data[at:line])
        if size is None or not data.startswith(b"\r\n", line + 2 + size):
            break
        pieces.append(data[line + 2 : line + 2 + size])
        at = line + size + 4
    return at


class LengthBody:
    """Counts down a Content-Length."""

    __slots__ = ("_left", "ended", "last_chunk", "partial", "surplus", "trailers")
    between = rested = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.partial = b""
        self.trailers = False
        self.ended = length == 0
        self.surplus = 0
        self.last_chunk = -1

    def feed(self, data: bytes) -> bytes:
        self._left -= len(data)
        self.ended = self._left <= 0
        if self._left < 0:
            self.surplus = -self._left
            return data[: self._left]
        return data


class RawBody:
    """A body that ends with its connection: whole only if the peer closed cleanly, which cannot be known better."""

    __slots__ = ("ended", "last_chunk", "partial", "surplus", "trailers")
    between = rested = True

    def __init__(self) -> None:
        self.partial = b""
        self.ended = self.trailers = False
        self.surplus = 0
        self.last_chunk = -1

    def feed(self, data: bytes) -> bytes:
        return data


WHOLE: Body = LengthBody(0)  # a body that came with its head; it is never fed
UNREAD: Body = (
    RawBody()
)  # the body of an answer whose head is still to come; it is never fed either


def body_for(head: Head) -> ChunkedBody | LengthBody | RawBody:
    if head.status in BODILESS:
        return LengthBody(0)
    if head.chunked:
        return ChunkedBody()
    return RawBody() if head.length is None else LengthBody(head.length)


def chunk(payload: bytes) -> bytes:
    """One chunk of Transfer-Encoding: chunked; nothing for nothing, since an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
