"""Tests of http_url(), which builds the URL of a host and a port."""

from __future__ import annotations

from gateway.util.urls import http_url


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert http_url("::1", 80) == "http://[::1]:80"
    assert http_url("localhost", 80) == "http://localhost:80"
