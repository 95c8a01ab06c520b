"""Property tests that aiohttp parses request heads equally if the gateway's parser accepts them."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser, HttpVersion11
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.protocol.api_table import API_PATHS
from gateway.protocol.request import request_head
from gateway.protocol.request.request_head import (
    MAX_FAST_HEAD_BYTES,
    MAX_HEAD_BYTES,
    is_partial_head,
    read_head,
    remains_partial_head,
)

NAMES = st.sampled_from(
    [
        *(
            "Host",
            "host",
            "Content-Length",
            "content-length",
            "Content-Type",
            "Connection",
            "Authorization",
            "Accept",
        ),
        *(
            "Transfer-Encoding",
            "Content-Encoding",
            "Expect",
            "Upgrade",
            "TE",
            "X-A",
            "x-a",
            "X_A",
            "X A",
            "",
            "Trailer",
        ),
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *(
                "test",
                "0",
                "2",
                "12",
                "02",
                "+2",
                "2,2",
                "0x2",
                "close",
                "keep-alive",
                "chunked",
                "",
                " ",
                "a  b",
            ),
            *("upgrade", "Upgrade, HTTP2-Settings", "upgrade, close", "h2c"),
        ]
    ),
    st.text(st.characters(min_codepoint=0, max_codepoint=255), max_size=8),
)
ENDS = st.sampled_from(["\r\n"] * 12 + ["\n", "\r", "\r\n ", "\r\n\t", ""])
FIELDS = st.lists(
    st.tuples(NAMES, st.sampled_from([": ", ":", " : ", ":\t"]), VALUES, ENDS), max_size=5
)
STARTS = st.sampled_from(
    [f"POST {path}{query} HTTP/1.1\r\n" for path in API_PATHS for query in ("", "?a=%20&b")] * 2
    + ["POST /v1/x HTTP/1.1\r\n", "POST  / "]
)


def heads(start: str, fields: list[tuple[str, str, str, str]]) -> bytes:
    return (start + "".join("".join(field) for field in fields) + "\r\n").encode("latin-1")


@settings(max_examples=1500, deadline=None)
@given(STARTS, FIELDS, st.booleans(), st.binary(max_size=20))
@example(
    "POST /v1/completions HTTP/1.1\r\n",
    [("Host", ": ", "a", "\r\n"), ("Content-Length", ":", "2", "\r\n")],
    False,
    b"",
)
@example(
    "POST /v1/completions HTTP/1.1\r\n",
    [("Connection", ": ", "Upgrade, HTTP2-Settings", "\r\n"), ("Upgrade", ": ", "h2c", "\r\n")],
    True,
    b"{}",
)
def test_an_ordinary_head_is_read_the_same_by_both_parsers(
    start: str, fields: list[tuple[str, str, str, str]], framed: bool, body: bytes
) -> None:
    if framed:
        fields = [
            ("Host", ": ", "test", "\r\n"),
            ("Content-Length", ": ", str(len(body)), "\r\n"),
            *fields,
        ]
    data = heads(start, fields) + body
    head = read_head(data, 0)
    if head is None:
        return
    extent = head.body_span(data, 0)
    assert extent is not None
    asyncio.run(_agrees(data, head.headers, head.api.path, extent))


async def _agrees(data: bytes, headers: object, path: str, extent: tuple[int, int]) -> None:
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(
        BaseProtocol(loop), loop, 2**16, max_line_size=8190, max_field_size=8192
    )
    messages, upgraded, _ = parser.feed_data(data[: extent[0]])
    assert len(messages) == 1
    message, payload = messages[0]
    assert not upgraded  # with h2c another protocol would follow the body
    assert (message.method, message.url.raw_path, message.version) == ("POST", path, HttpVersion11)
    assert not any((message.should_close, message.chunked, message.compression))
    assert {name.lower(): value for name, value in message.headers.items()} == headers
    length = extent[1] - extent[0]
    assert int(message.headers["Content-Length"]) == length
    assert payload.is_eof() == (length == 0)
    if length:
        parser.feed_data(b"x" * (length - 1))
        assert not payload.is_eof()
        parser.feed_data(b"x")
        assert payload.is_eof()
        assert payload.total_bytes == length


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["X-A", "Accept"]), st.sampled_from(["1", "two words"])),
        max_size=3,
    ),
    st.data(),
)
def test_every_prefix_of_an_ordinary_head_is_recognised(
    fields: list[tuple[str, str]], data: st.DataObject
) -> None:
    named = dict(fields)
    lines = "".join(
        f"{name}: {value}\r\n"
        for name, value in {"Host": "a", **named, "Content-Length": "2"}.items()
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode()
    assert read_head(head, 0)
    cut = data.draw(st.integers(1, len(head) - 1))
    assert is_partial_head(head[:cut])
    end = data.draw(st.integers(cut, len(head)))
    assert remains_partial_head(head[:cut], head[cut:end]) == (end < len(head))


@pytest.mark.parametrize(
    "text",
    [b"\x16\x03", b"\r\nGET", b"GET / HTTP/1.1\nHost", b"get", b"", b"A" * (MAX_HEAD_BYTES + 1)],
)
def test_an_invalid_beginning_is_no_partial_head(text: bytes) -> None:
    assert not is_partial_head(text)
    assert not remains_partial_head(b"GET / HTTP/1.1\r\nX: a", b"\nY: b")


def test_a_head_that_differs_only_in_its_length_is_recognised() -> None:
    first = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\nX-A: 1\r\n\r\n"
    head = read_head(first, 0)
    assert head is not None
    assert head.body_span(first.replace(b": 7", b": 1234"), 0) == (
        len(first) + 3,
        len(first) + 3 + 1234,
    )
    for old, new in (
        (b"X-A: 1", b"X-A: 2"),
        (b": 7", b": 07"),
        (b": 7", b": 7 "),
        (b": 7", b": +7"),
        (b": 7\r", b": 7"),
    ):
        assert head.body_span(first.replace(old, new), 0) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [b"0", b"7", b"12", b"99", b"07", b"1234", b"+1", b"", b"12 ", b"1" * 10]
            ),
            st.sampled_from([b"\r\nX: 1\r\n\r\n", b"\r\nX: 2\r\n\r\n", b"\r\nX: 1\r\n", b"\n"]),
            st.sampled_from([b"", b"{}", b"0\r\nX: 1\r\n\r\n"]),
            st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_heads_in_any_order_have_the_span_that_a_pattern_finds(
    heads: list[tuple[bytes, bytes, bytes, int]],
) -> None:
    before = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
    after = b"\r\nX: 1\r\n\r\n"
    head = read_head(before + b"7" + after, 0)
    assert head is not None
    pattern = re.compile(re.escape(before) + rb"(0|[1-9][0-9]{0,8})" + re.escape(after))
    for digits, ending, body, offset in heads:
        data = b"x" * offset + before + digits + ending + body
        match = pattern.match(data, offset)
        span = None if match is None else (match.end(), match.end() + int(match[1]))
        assert head.body_span(data, offset) == span


def test_a_head_longer_than_the_limit_is_not_ordinary() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\nX-A: %b\r\n\r\n"
    assert read_head(head % (b"a" * (MAX_FAST_HEAD_BYTES - len(head) + 2)), 0) is not None
    assert read_head(head % (b"a" * (MAX_FAST_HEAD_BYTES - len(head) + 3)), 0) is None
    assert is_partial_head(head[:-4] % (b"a" * MAX_FAST_HEAD_BYTES))


def test_a_head_without_its_end_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Matching the pattern would backtrack byte by byte, which takes half a millisecond.
    monkeypatch.delattr(request_head, "_HEAD")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 60_000
    assert request_head.read_head(head, 0) is None
    assert request_head.read_head(head[:8000], 0) is None
