"""The head of an ordinary request: a POST to a path of the line, framed by one Content-Length. Sans-IO.

The grammar is narrower than HTTP's on purpose. It admits what SDKs and proxies send, byte for byte without doubt about
where the request ends; everything else, however innocent, is for the full parser (gateway/lobby.py). So the two never
judge the same bytes, and this one refuses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.openai import LINE, Api
from gateway.slo import Fields

MAX_HEAD = 8 * 1024  # bytes; longer ones are for the full parser, which knows what to say about them
MAX_FIELDS = 64
MAX_UNFINISHED = 64 * 1024  # bytes of an unfinished head of any kind

# No blank before a value's end or its line's, nothing outside printable ASCII, no continuation lines, no bare CR or LF,
# no blank before a colon. Every byte can be part of one thing only, so matching is linear. Not possessive, although it
# could be: CPython before 3.11.5 matches possessive repeats wrongly (gh-106052), and would admit empty values.
_LINE = rb"POST (/v1/chat/completions|/v1/completions) HTTP/1\.1\r\n"
_NAME, _VALUE = rb"[A-Za-z][A-Za-z0-9-]*", rb"[!-~]+(?: [!-~]+)*"
_HEAD = re.compile(rb"%b((?:%b: ?%b\r\n){1,%d})\r\n" % (_LINE, _NAME, _VALUE, MAX_FIELDS))
_FIELD = re.compile(r"([^:]+): ?([^\r]+)\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: ?(0|[1-9][0-9]{0,8})(\r\n)", re.IGNORECASE)
_DIGITS = re.compile(rb"0|[1-9][0-9]{0,8}")
_HOST = re.compile(r"[A-Za-z0-9._-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")

# Whatever changes framing, or when the body may be sent.
UNUSUAL = frozenset(
    ("transfer-encoding", "content-encoding", "te", "trailer", "expect", "keep-alive", "proxy-connection")
)
_CONNECTION = frozenset(("keep-alive", "upgrade", "http2-settings"))
"""Connection options that change nothing here: a server may ignore Upgrade (RFC 9110, 7.8), and this one does."""


class Head:
    """What one head says, and the bytes around the digits of its length to know the next of its kind by.

    A client's requests on one connection mostly differ in their length alone, so most heads are compared, not parsed.
    """

    __slots__ = ("_after", "_before", "api", "headers")

    def __init__(self, api: Api, headers: Mapping[str, str], before: bytes, after: bytes) -> None:
        self.api = api
        self.headers = headers
        self._before = before
        self._after = after

    def extent(self, data: bytes, at: int) -> tuple[int, int] | None:
        """Where the body begins and ends, as places in `data`; None when another head stands at `at`."""
        if not data.startswith(self._before, at):
            return None
        digits = _DIGITS.match(data, at + len(self._before))
        if digits is None or not data.startswith(self._after, digits.end()):
            return None
        start = digits.end() + len(self._after)
        return start, start + int(digits[0])


def is_unfinished(data: bytes) -> bool:
    """Whether `data` may be the beginning of any request's head, whose rest is still on its way.

    False as soon as the full parser could refuse it for its line ends: nothing is kept that is known to be wrong.
    """
    return data[:1].isupper() and continues_head(b"", data)


def continues_head(begun: bytes, data: bytes) -> bool:
    """Whether an unfinished head with `data` behind it is still one. Reads `data` alone, so that drips cost little."""
    if len(begun) + len(data) > MAX_UNFINISHED:
        return False
    if b"\r\n\r\n" in begun[-3:] + data:
        return False
    return data.count(b"\n") == (begun[-1:] + data).count(b"\r\n")


def read_head(data: bytes, at: int) -> Head | None:
    """The head that begins at `at`, names in lower case; None when it is not ordinary or not whole yet."""
    whole = _HEAD.match(data, at, at + MAX_HEAD)
    if whole is None:
        return None
    fields = _FIELD.findall(whole[2].decode("ascii"))
    headers = Fields((name.lower(), value) for name, value in fields)
    if len(headers) != len(fields) or not UNUSUAL.isdisjoint(headers) or not _HOST.fullmatch(headers.get("host", "")):
        return None
    length = _LENGTH.search(data, at, whole.end())
    connection = headers.get("connection", "keep-alive").lower()
    if length is None or (connection != "keep-alive" and not _CONNECTION.issuperset(connection.split(", "))):
        return None
    return Head(LINE[whole[1].decode("ascii")], headers, data[at : length.start(1)], data[length.end(1) : whole.end()])
