"""Tests of answers to batch requests: how their parts are kept and joined."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.answer_receiver import LineClient, StreamedAnswer
from gateway.protocol.api_table import CHAT
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.response.date_header import ResponseClock

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
