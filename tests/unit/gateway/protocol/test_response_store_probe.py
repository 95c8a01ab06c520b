"""Tests of detecting whether an engine stores responses, by its answer to an impossible request."""

from __future__ import annotations

import pytest

from gateway.protocol.response_store_probe import shows_store

REFUSED = b'{"error":{"message":"requires VLLM_ENABLE_RESPONSES_API_STORE"}}'


@pytest.mark.parametrize(
    ("status", "body", "keeps"),
    [
        (404, b"{}", True),
        (400, REFUSED, False),
        (400, b'{"error":{"message":"unknown member"}}', None),
        (500, REFUSED, None),
        (200, b"{}", None),
    ],
)
def test_only_clear_responses_decide(status: int, body: bytes, keeps: bool | None) -> None:
    assert shows_store(status, body) is keeps
