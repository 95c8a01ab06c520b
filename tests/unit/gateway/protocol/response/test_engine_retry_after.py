"""Tests of the waiting times that engines name in Retry-After when they refuse a request."""

from __future__ import annotations

import pytest

from gateway.protocol.response.http_response_parser import parse_head

DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


@pytest.mark.parametrize(
    ("lines", "wait_s"),
    [
        ("Retry-After: 7", 7.0),
        ("retry-after:1.5 ", 1.5),
        (f"Date: {DATE}\r\nRetry-After: Wed, 21 Oct 2026 07:28:09 GMT", 9.0),
        (f"retry-after: Thu, 22 Oct 2026 00:00:00 GMT \r\ndate:{DATE}", 59_520.0),
        (f"date: {DATE}\r\nretry-after: Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (f"date: {DATE}\r\nretry-after: Wed, 21 Xyz 2026 07:28:00 GMT", None),
        (f"date: {DATE}", None),
        ("retry-after: Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("retry-after: -1", None),
        ("x-retry-after: 7", None),
    ],
)
@pytest.mark.parametrize("status", [429, 503, 500])
def test_the_time_in_retry_after_is_read(lines: str, wait_s: float | None, status: int) -> None:
    head = parse_head(b"HTTP/1.1 %d No\r\n%b\r\ncontent-length: 0\r\n" % (status, lines.encode()))
    assert head.wait_s == (None if status == 500 else wait_s)
