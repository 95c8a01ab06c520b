"""Tests of which web pages may call the API (CORS)."""

from __future__ import annotations

import pytest

from gateway.protocol.cors import MAX_REQUESTED_CHARS, CorsRule

APP = "https://app.example.com"
ASK = {"origin": APP, "access-control-request-method": "POST"}


def test_a_listed_origin_is_named_and_another_is_not() -> None:
    rule = CorsRule([APP, "http://localhost:3000"])
    permitted = dict(rule.response_headers({"origin": APP}))
    assert (permitted["access-control-allow-origin"], permitted["vary"]) == (APP, "origin")
    assert "x-request-id" in permitted["access-control-expose-headers"]
    for origin in ("https://evil.example", "null", APP + ".evil", ""):
        assert rule.response_headers({"origin": origin}) == (("vary", "origin"),)


def test_any_origin_is_permitted_where_the_list_says_so() -> None:
    headers = dict(CorsRule(["*"]).response_headers({"origin": "null"}))
    assert headers["access-control-allow-origin"] == "*"
    assert "vary" not in headers
    assert CorsRule(["*"]).response_headers({}) == ()


def test_a_preflight_gets_the_methods_and_the_headers_that_it_asks_for() -> None:
    asked = ASK | {"access-control-request-headers": "authorization,x-stainless-os"}
    headers = dict(CorsRule([APP]).preflight_headers(asked, ("GET", "POST")) or ())
    assert headers["access-control-allow-methods"] == "GET, POST"
    assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert headers["access-control-max-age"] == "600"


@pytest.mark.parametrize(
    "names", ["a\r\nset-cookie: x", "a,,b", "a b", "x" * MAX_REQUESTED_CHARS + "x"]
)
def test_malformed_names_of_headers_are_not_repeated(names: str) -> None:
    asked = ASK | {"access-control-request-headers": names}
    headers = dict(CorsRule([APP]).preflight_headers(asked, ("POST",)) or ())
    assert "access-control-allow-headers" not in headers


def test_a_preflight_of_another_origin_gets_no_permission() -> None:
    asked = ASK | {"origin": "https://evil.example"}
    assert CorsRule([APP]).preflight_headers(asked, ("POST",)) == (("vary", "origin"),)


def test_a_request_without_origin_or_method_is_no_preflight() -> None:
    assert CorsRule([APP]).preflight_headers({"origin": APP}, ("POST",)) is None
    method = {"access-control-request-method": "POST"}
    assert CorsRule([APP]).preflight_headers(method, ("POST",)) is None
