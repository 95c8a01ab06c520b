"""Tests of the exact bytes of a mock engine's responses.

A stream must have the same content as the response that is not streamed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mockgpu.http.choice_and_stop_reason import build_choices
from mockgpu.http.openai_format import DONE, StreamChunks, full_response, stream_end, stream_error
from mockgpu.request_parser import (
    ApiError,
    MalformedHandoffError,
    ParsedRequest,
    RequestBody,
    check_handoff,
    decode_body,
    parse_request,
)


def parsed(chat: bool = True, **fields: Any) -> ParsedRequest:
    what = (
        {"messages": [{"role": "user", "content": 'quotes " and \\ and ü'}]}
        if chat
        else {"prompt": "once"}
    )
    return parse_request(
        decode_body(json.dumps(what | fields).encode(), RequestBody), {}, chat, "m", 4096, "id-1"
    )


def unframed(data: bytes) -> list[dict[str, Any]]:
    # Return the events inside HTTP chunks. Asserts that the chunk sizes are right.
    events = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        body, data = rest[: int(size, 16)], rest[int(size, 16) :].removeprefix(b"\r\n")
        assert body.startswith(b"data: ")
        assert body.endswith(b"\n\n")
        events.append(json.loads(body[6:]))
    return events


def streamed(question: ParsedRequest) -> list[dict[str, Any]]:
    (choice,) = build_choices(question)
    chunks = StreamChunks(question, choice, 123)
    return unframed(b"".join(chunks.next(0) for _ in range(choice.output_tokens)))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"logprobs": 1},
        {"seed": 5},
        {"max_tokens": 1},
        {"max_tokens": 2},
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(chat: bool, fields: dict[str, Any]) -> None:
    if chat and "logprobs" in fields:
        fields = {"logprobs": True}
    question = parsed(chat, **({"max_tokens": 9, "stream": True} | fields))
    events = streamed(question)
    answer = json.loads(full_response(question, build_choices(question), 123, 0))
    parts = [event["choices"][0] for event in events]
    if chat:
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(part["delta"]["content"] for part in parts)
        assert text == answer["choices"][0]["message"]["content"]
    else:
        text = "".join(part["text"] for part in parts)
        assert text == answer["choices"][0]["text"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert {(event["id"], event["created"], event["model"]) for event in events} == {
        ("id-1", 123, "m")
    }
    assert all(event.keys() == events[0].keys() for event in events)


def test_echo_gives_the_prompt_back_first() -> None:
    question = parsed(False, echo=True, stream=True, max_tokens=3)
    assert streamed(question)[0]["choices"][0]["text"] == "once"
    answer = json.loads(full_response(question, build_choices(question), 1, 0))
    assert answer["choices"][0]["text"].startswith("once ")


def test_an_echo_without_an_answer_is_the_scored_prompt_alone() -> None:
    question = parsed(False, echo=True, max_tokens=0, logprobs=1)
    (choice,) = json.loads(full_response(question, build_choices(question), 1, 0))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("once", "length")
    assert "".join(choice["logprobs"]["tokens"]) == "once"
    assert choice["logprobs"]["text_offset"][0] == 0
    stream = parsed(False, echo=True, max_tokens=0, stream=True)
    assert "".join(event["choices"][0]["text"] for event in streamed(stream)) == "once"


@pytest.mark.parametrize(("chat", "echo"), [(True, True), (True, False), (False, False)])
def test_no_tokens_are_refused_where_nothing_is_echoed(chat: bool, echo: bool) -> None:
    with pytest.raises(ApiError, match="at least 1"):
        parsed(chat, echo=echo, max_tokens=0)


def test_a_stream_ends_with_done_after_usage_and_after_an_error() -> None:
    plain, counted = (
        parsed(stream=True),
        parsed(stream=True, stream_options={"include_usage": True}, max_tokens=4),
    )
    assert stream_end(plain, build_choices(plain), 1, 0) == b"e\r\n" + DONE + b"\r\n"
    usage = stream_end(counted, build_choices(counted), 1, 7)
    assert b'"choices":[]' in usage
    assert b'"cached_tokens":7' in usage
    assert usage.endswith(DONE + b"\r\n")
    assert stream_error(ApiError(500, "x").body()).endswith(DONE + b"\r\n")


def test_usage_counts_each_prompt_once_and_every_choice() -> None:
    question = parsed(False, prompt=["abcd" * 3, "abcd" * 5], n=2, max_tokens=6)
    usage = json.loads(full_response(question, build_choices(question), 1, None))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        8,
        24,
        32,
    )
    assert usage["prompt_tokens_details"] is None


@pytest.mark.parametrize("header", ["x-override-host", "X-Prefiller-Host-Port"])
def test_a_handoff_header_is_malformed(header: str) -> None:
    with pytest.raises(MalformedHandoffError):
        check_handoff(decode_body(b'{"prompt":"x"}', RequestBody), {header: "y"})


def test_an_absent_model_is_the_one_served_and_null_fields_are_absent() -> None:
    question = parsed(
        model=None, stop=None, n=None, stream=None, kv_transfer_params=None, tools=None
    )
    assert (question.model, question.n, question.is_stream) == ("m", 1, False)


def test_max_completion_tokens_wins_over_max_tokens_in_chat() -> None:
    assert parsed(max_tokens=5, max_completion_tokens=7).limit == 7


def test_a_completion_defaults_to_sixteen_tokens_and_a_chat_to_its_own_end() -> None:
    assert parsed(False).limit == 16
    assert parsed().can_end
    assert not parsed(ignore_eos=True).can_end
    assert not parsed(max_tokens=5).can_end


def test_a_large_limit_may_be_a_cap() -> None:
    def can_end(limit: int, **fields: Any) -> bool:
        body = parsed(max_tokens=limit, **fields).body
        return parse_request(body, {}, True, "m", 4096, "id-1", may_end_from=1024).can_end

    assert [can_end(limit) for limit in (1023, 1024, 2000)] == [False, True, True]
    assert not can_end(2000, ignore_eos=True)
