"""Tests of how the API key is read from a request's headers."""

from __future__ import annotations

import pytest

from gateway.protocol.errors import GatewayError
from gateway.protocol.request.api_keys import digest_of_headers, key_digest


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-1"},
        {"authorization": "bearer  sk-1 "},
        {"x-api-key": "sk-1"},
        {"x-api-key": " sk-1 "},
        {"x-api-key": "sk-1", "authorization": "Bearer sk-1"},
        {"x-api-key": "sk-1", "authorization": "Basic abc"},
    ],
)
def test_a_key_is_a_bearer_or_anthropics_header(headers: dict[str, str]) -> None:
    assert digest_of_headers(headers) == key_digest("sk-1")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "Incorrect API key"),
        ({"authorization": "Basic sk-1"}, "Incorrect API key"),
        ({"authorization": "Bearer"}, "Incorrect API key"),
        ({"authorization": "sk-1"}, "Incorrect API key"),
        ({"x-api-key": ""}, "Incorrect API key"),
        ({"x-api-key": "sk-1", "authorization": "Bearer sk-2"}, "Two different API keys"),
    ],
)
def test_a_missing_or_ambiguous_key_is_refused_and_not_repeated(
    headers: dict[str, str], message: str
) -> None:
    with pytest.raises(GatewayError, match=message) as caught:
        digest_of_headers(headers)
    assert caught.value.status == 401
    assert "sk-" not in caught.value.message
