"""Property tests that a response head that is only compared with the last one is read correctly."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.response.http_response_parser import (
    MAX_HEAD_BYTES,
    FramingError,
    ResponseHead,
    ResponseHeadReader,
    parse_head,
)

LINES = st.lists(
    st.sampled_from(
        [
            *(b"Content-Length: 12", b"content-length: 7", b"Content-Length:123", b"x: a"),
            *(b"Content-Length: 0", b"Content-Length: 07", b"Content-Length: 12 ", b"date: today"),
            *(b"Content-Length: +1", b"Content-Length: 9999999999", b"Connection: close"),
            *(b"Transfer-Encoding: chunked", b"Content-Type: text/event-stream", b"broken"),
            *(
                b"Content-Type: application/json",
                b"X-Content-Length: 12",
                b"Content-Encoding: gzip",
            ),
        ]
    ),
    max_size=4,
)
HEADS = st.tuples(
    st.sampled_from(
        [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 404 No", b"HTTP/1.1 100 C"]
    ),
    LINES,
    st.sampled_from([b"\r\n\r\n", b"\r\n", b"\r\n\r\n{}", b"\r\n\r\n\r\n\r\n"]),
    st.integers(0, 2),
)


def read(reader: ResponseHeadReader, data: bytes, offset: int) -> object:
    try:
        return reader.read(data, offset)
    except FramingError as error:
        return str(error)


def parse(data: bytes, offset: int) -> tuple[ResponseHead, int] | str | None:
    end = data.find(b"\r\n\r\n", offset)
    try:
        return None if end < 0 else (parse_head.__wrapped__(data[offset : end + 2]), end + 4)
    except FramingError as error:
        return str(error)


@given(st.lists(HEADS, max_size=12))
@example([(b"HTTP/1.1 200 OK", [b"Content-Length: 12", b"x: a"], b"\r\n\r\n", 0)] * 2)
def test_heads_in_any_order_are_read_as_the_parser_reads_each(
    heads: list[tuple[bytes, list[bytes], bytes, int]],
) -> None:
    reader = ResponseHeadReader()
    for status, lines, ending, offset in heads:
        data = b"x" * offset + b"\r\n".join([status, *lines]) + ending
        assert read(reader, data, offset) == parse(data, offset)


@given(st.lists(st.sampled_from([b"1", b"12", b"01", b"0", b"1234567890", b"", b"1x"]), max_size=9))
def test_heads_that_differ_only_in_their_length_are_read_as_the_parser_reads_each(
    lengths: list[bytes],
) -> None:
    reader = ResponseHeadReader()
    for length in lengths:
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\ndate: now\r\n\r\n{}" % length
        assert read(reader, data, 0) == parse(data, 0)


def test_a_head_without_end_is_refused_at_the_limit() -> None:
    reader, data = ResponseHeadReader(), b"HTTP/1.1 200 OK\r\nx: " + b"a" * MAX_HEAD_BYTES
    assert reader.read(data[: MAX_HEAD_BYTES - 1], 0) is None
    assert read(reader, data, 0) == "the engine's response head is longer than 65536 bytes"
