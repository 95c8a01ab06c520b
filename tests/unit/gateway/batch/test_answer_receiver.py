"""Tests of answers to batch requests: when they are streamed, and how their parts are joined."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.answer_receiver import LineClient, StreamedAnswer, rest_body, streamed_body
from gateway.batch.result_journal import KeptAnswer
from gateway.protocol.api_table import CHAT, COMPLETIONS, EMBEDDINGS
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.response.date_header import ResponseClock

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
WORDS = ["one", " two", " three", " four"]


def chunk(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    head = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    return b"data: " + json.dumps(head | {"choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


STREAM = (
    b"".join(map(chunk, WORDS)) + chunk("", "stop") + usage(5, len(WORDS)) + b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_a_stream_cut_anywhere_gives_the_same_body(cuts: list[int]) -> None:
    answer = StreamedAnswer(CHAT)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(STREAM)], strict=True):
        answer.feed(STREAM[start:end])
    assert answer.is_complete
    body = json.loads(answer.body())
    assert (body["id"], body["object"], body["created"]) == ("c-1", "chat.completion", 7)
    assert body["choices"][0]["message"]["content"] == "one two three four"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4


def test_an_answer_stopped_twice_has_the_text_and_counts_of_the_whole() -> None:
    first = StreamedAnswer(CHAT)
    first.feed(chunk("one"))
    kept = first.keep([10, 11], [1], 2)
    second = StreamedAnswer(CHAT, kept)
    second.feed(chunk(" two") + chunk(" three"))
    kept = second.keep([10, 11, 1], [2, 3], 3)
    assert kept is not None
    assert (kept.prompt, kept.tokens, kept.prompt_tokens) == ([10, 11], [1, 2, 3], 2)
    third = StreamedAnswer(CHAT, kept)
    third.feed(chunk(" four") + chunk("", "stop") + usage(5, 1))
    body = json.loads(third.body())
    assert body["choices"][0]["message"]["content"] == "one two three four"
    expected = {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert body["usage"] == expected


def test_an_attempt_without_a_token_keeps_what_there_was() -> None:
    assert StreamedAnswer(CHAT).keep([1], [], 1) is None


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


def line_client(answer: StreamedAnswer | None = None) -> LineClient:
    return LineClient(b"{}", {}, ResponseClock(), answer)


def test_a_response_is_collected_whatever_its_pieces() -> None:
    client = line_client()
    for piece in (b"HTTP/1.1 200 OK\r\ncontent", b"-type: x\r\n\r", b"\n{}", b"\n"):
        client.write(piece)
    assert (client.status, client.body) == (200, b"{}\n")


def test_an_error_of_the_gateway_is_collected_with_its_retry_time() -> None:
    client = line_client()
    error = GatewayError(Failure.OVERLOADED, "full", retry_after_s=3.0)
    client.send_error(error, "req_1")
    assert (client.status, client.retry_after_s) == (429, 3.0)
    assert json.loads(client.body)["error"]["message"] == "full"
