"""Tests of the names of header fields that a connection keeps with its first request head."""

from __future__ import annotations

import pytest

from gateway.protocol.request.request_head import read_head

COMMON = (
    "Host: a\r\nContent-Type: application/json\r\nX-Stainless-Lang: python\r\n"
    "authorization: Bearer sk\r\nContent-Length: 2\r\n"
)


def names_of(fields: str) -> list[str]:
    head = read_head(f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n".encode(), 0)
    assert head is not None
    return list(head.headers)


@pytest.mark.parametrize("other", [COMMON, COMMON.lower()])
def test_heads_share_the_strings_of_common_names(other: str) -> None:
    first, second = names_of(COMMON), names_of(other)
    assert first == ["host", "content-type", "x-stainless-lang", "authorization", "content-length"]
    assert all(one is another for one, another in zip(first, second, strict=True))


def test_other_names_are_converted_to_lower_case() -> None:
    fields = "Host: a\r\nX-Team-Key: 1\r\nHOst-Name: 2\r\nContent-Length: 2\r\n"
    assert names_of(fields) == ["host", "x-team-key", "host-name", "content-length"]
