"""Property tests that a translated stream loses no text, tool call or token count.

The stream is split anywhere.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.translate import messages_answer, responses_answer
from gateway.protocol.translate.messages_answer import MessagesStream
from gateway.protocol.translate.responses_stream import ResponsesStream
from gateway.protocol.translate.translator import StreamTranslator
from tests.unit.gateway.protocol.translate.chats import (
    USAGE,
    Piece,
    answer,
    feed,
    finish,
    message_of,
    response_of,
    stream,
)

TEXTS = st.text(min_size=1, max_size=20)
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=3).map(json.dumps)
CALLS = st.tuples(st.just("call"), st.tuples(st.sampled_from(["read", "run"]), ARGUMENTS))
ANSWERS = st.tuples(
    st.lists(st.tuples(st.just("thought"), TEXTS), max_size=1),
    st.lists(st.tuples(st.just("text"), TEXTS), max_size=1),
    st.lists(CALLS, max_size=3),
).map(lambda parts: [piece for part in parts for piece in part])
ECHOED: dict[str, Any] = responses_answer.echo(b'{"model": "asked", "input": "x"}')
CUTS = st.lists(st.integers(0, 4000), max_size=12)


def fed(translator: StreamTranslator, data: bytes, cuts: list[int]) -> bytes:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    out = [feed(translator, data[start:end]) for start, end in pairwise(places)]
    return b"".join(out) + finish(translator)


@given(ANSWERS, st.integers(1, 9), CUTS)
def test_a_messages_stream_adds_up_to_the_whole_message(
    pieces: list[Piece], size: int, cuts: list[int]
) -> None:
    data = stream(pieces, size=size)
    out = fed(MessagesStream("asked"), data, cuts)
    assert out == fed(MessagesStream("asked"), data, [])
    whole = json.loads(b"".join(messages_answer.from_chat(answer(pieces), "asked")))
    assert message_of(out) == whole
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 120
    assert whole["usage"]["output_tokens"] == USAGE["completion_tokens"]
    assert [block["name"] for block in whole["content"] if block["type"] == "tool_use"] == [
        value[0] for kind, value in pieces if kind == "call"
    ]


@given(ANSWERS, st.integers(1, 9), CUTS)
def test_a_responses_stream_adds_up_to_the_whole_response(
    pieces: list[Piece], size: int, cuts: list[int]
) -> None:
    data = stream(pieces, size=size)
    out = fed(ResponsesStream("asked", ECHOED), data, cuts)
    assert out == fed(ResponsesStream("asked", ECHOED), data, [])
    whole = json.loads(b"".join(responses_answer.from_chat(answer(pieces), "asked", ECHOED)))
    assert response_of(out) == whole
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (120, 30)
    assert [item["arguments"] for item in whole["output"] if item["type"] == "function_call"] == [
        value[1] for kind, value in pieces if kind == "call"
    ]


@given(ANSWERS, st.integers(0, 3000))
def test_a_stream_that_breaks_off_ends_with_an_error(pieces: list[Piece], length: int) -> None:
    data = stream(pieces)
    cut = data[: min(length, data.index(b'"finish_reason": "') - 1)]
    assert b"event: error\n" in fed(MessagesStream("asked"), cut, [])
    assert b"event: response.failed\n" in fed(ResponsesStream("asked", ECHOED), cut, [])


@given(st.binary(max_size=300), CUTS)
def test_any_bytes_give_a_stream_that_ends(data: bytes, cuts: list[int]) -> None:
    for translator in (MessagesStream("asked"), ResponsesStream("asked", ECHOED)):
        out = fed(translator, data, cuts)
        assert out.endswith(b"\n\n")
        assert feed(translator, b"data: [DONE]\n\n") == b""
