"""Tests of the parser of short responses.

The result does not depend on how the bytes are divided into reads, and malformed responses are
refused.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.response.http_response_parser import FramingError
from gateway.protocol.response.short_response import ShortResponse

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello"


@pytest.mark.parametrize(
    ("response", "status", "can_be_followed"),
    [
        (LENGTH, 200, True),
        (CHUNKED, 503, True),
        (INTERIM, 200, True),
        (UNTIL_CLOSED, 200, False),
        (LENGTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 200, False),
        (LENGTH + b"HTTP/1.1", 200, False),
    ],
)
@given(cuts=st.lists(st.integers(0, 80), max_size=5))
def test_a_response_is_the_same_however_its_bytes_are_split(
    response: bytes, status: int, can_be_followed: bool, cuts: list[int]
) -> None:
    reading = ShortResponse(limit=100)
    ends = [*sorted(min(cut, len(response)) for cut in cuts), len(response)]
    begin = 0
    for end in ends:
        if reading.is_complete and not response[begin:end]:
            continue
        if not reading.is_complete:
            reading.feed(response[begin:end])
            begin = end
    if response is UNTIL_CLOSED:
        assert not reading.is_complete
        assert reading.end()
    assert (reading.is_complete, reading.status, bytes(reading.body)) == (True, status, b"hello")
    if begin == len(response):
        assert reading.can_be_followed is can_be_followed


def test_a_body_is_read_up_to_the_limit_and_the_connection_is_not_used_again() -> None:
    reading = ShortResponse(limit=3)
    reading.feed(LENGTH[:-1])
    assert (reading.is_complete, bytes(reading.body)) == (True, b"hel")
    assert not reading.can_be_followed


def test_a_response_that_ends_in_the_middle_is_not_complete() -> None:
    reading = ShortResponse(limit=100)
    reading.feed(LENGTH[:-1])
    assert not reading.end()


@pytest.mark.parametrize("data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000])
def test_bytes_that_are_no_response_are_refused(data: bytes) -> None:
    with pytest.raises(FramingError):
        ShortResponse(limit=100).feed(data)
