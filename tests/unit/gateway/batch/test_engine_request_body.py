"""Tests of which batch requests are sent as streams, and how the rest of one is requested."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.batch.engine_request_body import rest_body, streamed_body, whole_body
from gateway.batch.result_journal import KeptAnswer
from gateway.protocol.api_table import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


def test_the_rest_is_requested_with_the_tokens_that_are_left() -> None:
    streamed = streamed_body(
        json.dumps(BODY | {"temperature": 0.5, "min_tokens": 4}).encode(), CHAT
    )
    assert streamed is not None
    kept = KeptAnswer([1, 2], [3, 4, 5], "x", streamed[1].sampling["temperature"], 2)
    body = json.loads(rest_body(streamed[1], kept, "m"))
    assert body["prompt"] == [1, 2, 3, 4, 5]
    assert (body["max_tokens"], body["min_tokens"], body["temperature"]) == (6, 1, 0.5)
    assert body["stream"] is True


@pytest.mark.parametrize(
    "members",
    [
        {"n": 2},
        {"logprobs": True},
        {"tools": [{"type": "function"}]},
        {"stop": ["x"]},
        {"response_format": {"type": "json_object"}},
        {"max_tokens": "9"},
        {"unknown": 1},
    ],
)
def test_a_request_that_cannot_be_continued_is_sent_as_it_is(members: dict[str, Any]) -> None:
    assert streamed_body(json.dumps(BODY | members).encode(), CHAT) is None


def test_apis_without_streams_are_sent_as_they_are() -> None:
    assert streamed_body(b'{"model": "m", "input": "x"}', EMBEDDINGS) is None
    assert streamed_body(b'{"model": "m", "prompt": ["x", "y"]}', COMPLETIONS) is None
    assert streamed_body(b'{"model": "m"}', COMPLETIONS) is None


def test_an_engine_stores_responses_of_a_batch_only_if_it_is_asked_to() -> None:
    body = {"model": "m", "input": "x"}
    assert json.loads(whole_body(json.dumps(body).encode(), RESPONSES)) == body | {"store": False}
    for store in (True, False):
        asked = json.dumps(body | {"store": store}).encode()
        assert whole_body(asked, RESPONSES) == asked
    assert whole_body(b'{"input": "x", "store": null}', RESPONSES) == b'{"input":"x","store":false}'
    assert whole_body(b'{"input": "x"}', EMBEDDINGS) == b'{"input": "x"}'
