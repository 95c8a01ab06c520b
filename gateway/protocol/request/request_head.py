"""Parses the head of an ordinary request: a POST to a known path with one Content-Length. No I/O.

It accepts only heads as SDKs and proxies send them, in which the end of the request is unambiguous.
Any other request goes to the full parser (AiohttpConnection). Each request is parsed by only one of
the two. This module never rejects a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.protocol.api_table import API_PATHS, Api
from gateway.protocol.byte_scan import body_span, whole_body
from gateway.protocol.request.service_level_headers import HeaderFields

# Heads with more bytes are read, and if necessary refused, by aiohttp_connection.py.
MAX_FAST_HEAD_BYTES = 8 * 1024
MAX_FIELDS = 64
MAX_HEAD_BYTES = 64 * 1024  # bytes; applies to heads of all kinds

# The pattern rejects blanks before a colon or at the end of a line, bytes outside printable ASCII,
# continuation lines, bare CR or LF. Each byte can match only one part, so matching takes linear
# time. The repeats are not possessive: CPython before 3.11.5 matches those wrongly (gh-106052) and
# would accept empty values.
_PATHS = "|".join(map(re.escape, API_PATHS)).encode()
# A query is allowed and has no effect; the bytes are those of the unreserved characters, escapes,
# and separators that forms use.
_LINE = rb"POST (%b)(?:\?[A-Za-z0-9._~%%&=+,:;@/-]*)? HTTP/1\.1\r\n" % _PATHS
_NAME, _VALUE = rb"[A-Za-z][A-Za-z0-9-]*", rb"[!-~]+(?: [!-~]+)*"
_HEAD = re.compile(rb"%b((?:%b: ?%b\r\n){1,%d})\r\n" % (_LINE, _NAME, _VALUE, MAX_FIELDS))
_FIELD = re.compile(r"([^:]+): ?([^\r]+)\r\n")
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: ?(0|[1-9][0-9]{0,8})(\r\n)", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9._-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")

# A connection keeps the head of its first request. Names that are common share one string, which
# saves half a kilobyte per connection.
_COMMON_NAMES = (
    *("host", "connection", "content-length", "content-type", "user-agent", "accept"),
    *("accept-encoding", "accept-language", "authorization", "x-api-key", "api-key", "cookie"),
    *("x-request-id", "traceparent", "tracestate", "idempotency-key", "anthropic-version"),
    *("anthropic-beta", "openai-organization", "openai-project", "x-forwarded-for", "x-real-ip"),
    *("x-forwarded-host", "x-forwarded-port", "x-forwarded-proto", "x-stainless-arch"),
    *("x-stainless-async", "x-stainless-lang", "x-stainless-os", "x-stainless-package-version"),
    *("x-stainless-read-timeout", "x-stainless-retry-count", "x-stainless-runtime"),
    *("x-stainless-runtime-version", "x-stainless-timeout"),
)
_SHARED_NAMES = {form: name for name in _COMMON_NAMES for form in (name, name.title())}

# Fields that change framing or when the body may be sent.
UNSUPPORTED_FIELDS = frozenset(
    (
        "transfer-encoding",
        "content-encoding",
        "te",
        "trailer",
        "expect",
        "keep-alive",
        "proxy-connection",
    )
)
_CONNECTION = frozenset(("keep-alive", "upgrade", "http2-settings"))
"""Values of the Connection header that have no effect here: a server may ignore Upgrade (RFC 9110,
7.8)."""


class RequestHead:
    """A parsed request head, with the bytes before and after the digits of its Content-Length.

    Requests on one connection usually differ only in their length. Therefore most heads need no
    parsing: these bytes are compared instead.
    """

    __slots__ = ("_after", "_before", "api", "headers")

    def __init__(self, api: Api, headers: Mapping[str, str], before: bytes, after: bytes) -> None:
        self.api = api
        self.headers = headers
        self._before = before
        self._after = after

    def body_span(self, data: bytes, offset: int) -> tuple[int, int] | None:
        """Return the offsets in `data` at which this head's body begins and ends.

        Returns None if a different head begins at `offset`. The body may extend beyond `data`.
        """
        return body_span(data, offset, self._before, self._after)

    def whole_body(self, data: bytes) -> bytes | None:
        """Return the request's body if `data` is exactly one request with this head, else None.

        The length of the body may differ from that of the parsed request.
        """
        return whole_body(data, self._before, self._after)


def is_partial_head(data: bytes) -> bool:
    """Return whether `data` may be the beginning of an incomplete request head.

    The result is False as soon as the full parser could reject the line ends, so that no invalid
    data is buffered.
    """
    return data[:1].isupper() and remains_partial_head(b"", data)


def remains_partial_head(head: bytes, data: bytes) -> bool:
    """Return whether the incomplete head `head` is still incomplete after `data`.

    Only `data` is searched, so that a head that arrives in many pieces takes little time.
    """
    if len(head) + len(data) > MAX_HEAD_BYTES:
        return False
    if _END in head[-3:] + data:
        return False
    return data.count(b"\n") == (head[-1:] + data).count(b"\r\n")


def read_head(data: bytes, offset: int) -> RequestHead | None:
    """Parse the request head that begins at `offset` in `data`.

    Names of header fields are converted to lower case. Returns None if the head is incomplete, or
    if the full parser has to parse it.
    """
    # Without its end, matching a head takes longest: it gives back each value byte by byte.
    end = data.find(_END, offset, offset + MAX_FAST_HEAD_BYTES)
    if end < 0:
        return None
    match = _HEAD.match(data, offset, end + len(_END))
    if match is None:
        return None
    fields = _FIELD.findall(match[2].decode("ascii"))
    headers = HeaderFields(
        (_SHARED_NAMES.get(name) or name.lower(), value) for name, value in fields
    )
    if (
        len(headers) != len(fields)
        or not UNSUPPORTED_FIELDS.isdisjoint(headers)
        or not _HOST.fullmatch(headers.get("host", ""))
    ):
        return None
    length = _LENGTH.search(data, offset, match.end())
    connection = headers.get("connection", "keep-alive").lower()
    if length is None or (
        connection != "keep-alive" and not _CONNECTION.issuperset(connection.split(", "))
    ):
        return None
    return RequestHead(
        API_PATHS[match[1].decode("ascii")],
        headers,
        data[offset : length.start(1)],
        data[length.end(1) : match.end()],
    )
