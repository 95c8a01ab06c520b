"""Tests that a whole answer becomes a stream where the client asked for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.protocol.api_table import MESSAGES, RESPONSES, Api
from gateway.protocol.response.named_event_relay import NamedEventRelay
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.relay_state import DONE
from gateway.protocol.response.whole_answer_to_stream import (
    EventWriter,
    write_chunks,
    write_chunks_with_usage,
    write_message,
    write_response,
)
from gateway.protocol.translate import translation_table
from gateway.protocol.upstream_error import UpstreamError

TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 5,
    "model": "m",
    "system_fingerprint": "v1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "tool_calls": [TOOL_CALL]},
            "logprobs": {"content": []},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "m",
    "choices": [{"index": i, "text": f"t{i}", "finish_reason": "length"} for i in (0, 1)],
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "output": [
        {"id": "rs", "type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "id": "msg",
            "type": "message",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hi", "annotations": []}],
        },
        {"id": "fc", "type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
    ],
    "usage": {"input_tokens": 3, "output_tokens": 2},
}


def wire(answer: object, *, length: int | None = None) -> bytes:
    body = json.dumps(answer).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (len(body) if length is None else length) + body


def streamed(relay: Relay, writer: EventWriter, response: bytes, size: int = 10_000) -> bytes:
    relay.event_writer = writer
    out = b"".join(
        relay.feed(response[at : at + size], 1.0) for at in range(0, len(response), size)
    )
    while relay.state is not DONE:
        out += relay.feed(b"", 1.0)
    return out


def events_of(out: bytes) -> list[Any]:
    head, _, body = out.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream\r\n" in head
    assert b"transfer-encoding: chunked" in head
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) if line != b"[DONE]" else "[DONE]" for line in lines]


def special(api: Api) -> NamedEventRelay:
    assert api.grammar is not None
    return NamedEventRelay(b"", None, False, None, None, api.grammar, api.errors)


def test_a_whole_chat_with_invalid_utf_8_becomes_chunks_with_replacement_characters() -> None:
    response = wire(CHAT).replace(b'"content": "hi"', b'"content": "h\x80"')
    first, _, _ = events_of(streamed(Relay(b""), write_chunks, response))
    assert first["choices"][0]["delta"]["content"] == "h\ufffd"


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_a_whole_chat_becomes_chunks(size: int) -> None:
    relay = Relay(b"")
    first, last, done = events_of(streamed(relay, write_chunks, wire(CHAT), size))
    assert done == "[DONE]"
    assert {first["object"], last["object"]} == {"chat.completion.chunk"}
    assert first["system_fingerprint"] == "v1"
    delta = {"role": "assistant", "content": "hi", "tool_calls": [{"index": 0} | TOOL_CALL]}
    assert first["choices"][0]["delta"] == delta
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert "usage" not in first
    assert (relay.is_converted, relay.has_error_event) == (True, False)
    assert (relay.usage.prompt_tokens, relay.usage.completion_tokens) == (3, 2)
    assert relay.finish_reason == "tool_calls"
    assert relay.is_connection_reusable


def test_token_counts_are_the_last_chunk_where_they_were_asked_for() -> None:
    *chunks, counts, _ = events_of(streamed(Relay(b""), write_chunks_with_usage, wire(CHAT)))
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert (counts["choices"], counts["usage"]) == ([], CHAT["usage"])


@pytest.mark.parametrize("has_index", [True, False])
def test_every_choice_of_a_completion_has_its_index_and_ends_with_its_reason(
    has_index: bool,
) -> None:
    sent: list[dict[str, Any]] = [dict(choice) for choice in COMPLETION["choices"]]
    for choice in sent:
        if not has_index:
            del choice["index"]
    answer = wire(COMPLETION | {"choices": sent})
    *chunks, _ = events_of(streamed(Relay(b""), write_chunks, answer))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(each["index"], each["text"], each["finish_reason"]) for each in choices] == [
        (0, "t0", None),
        (0, "", "length"),
        (1, "t1", None),
        (1, "", "length"),
    ]


def test_a_whole_message_becomes_its_events() -> None:
    relay = special(MESSAGES)
    events = events_of(streamed(relay, write_message, wire(MESSAGE)))
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta"),
        "content_block_stop",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        *("message_delta", "message_stop"),
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        *("thinking_delta", "signature_delta", "text_delta", "input_json_delta")
    ]
    assert json.loads(deltas[-1]["partial_json"]) == {"a": 1}
    assert (relay.usage.prompt_tokens, relay.usage.completion_tokens) == (3, 2)
    assert (relay.finish_reason, relay.has_error_event) == ("tool_use", False)


def test_a_whole_response_becomes_its_numbered_events() -> None:
    relay = special(RESPONSES)
    events = events_of(streamed(relay, write_response, wire(RESPONSE)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"
    assert (events[-1]["type"], events[-1]["response"]) == ("response.completed", RESPONSE)
    texts = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert texts == ["hm", "hi"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == RESPONSE["output"]
    assert (relay.usage.prompt_tokens, relay.usage.completion_tokens) == (3, 2)


def test_a_whole_chat_is_translated_to_the_events_of_another_api() -> None:
    new = translation_table._messages(b'{"model":"m","messages":[]}', "m", 9)
    relay = Relay(b"", translator=new())
    events = events_of(streamed(relay, write_chunks_with_usage, wire(CHAT)))
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("answer", [{"object": "list", "data": []}, [1], {"choices": "no"}])
def test_json_that_is_no_answer_of_the_api_passes_as_it_is(answer: object) -> None:
    out = streamed(Relay(b""), write_chunks, wire(answer))
    assert b"content-type: application/json" in out
    assert out.endswith(json.dumps(answer).encode())


def test_an_error_in_place_of_a_stream_keeps_its_status() -> None:
    relay = Relay(b"")
    streamed(relay, write_chunks, wire({"error": {"code": 400, "message": "too long"}}))
    assert (relay.is_refused, relay.status) == (True, 400)


def test_a_whole_answer_that_is_cut_off_can_be_retried() -> None:
    relay, answer = Relay(b""), wire(CHAT, length=100)
    with pytest.raises(UpstreamError, match="not valid JSON"):
        streamed(relay, write_chunks, answer[: answer.index(b"\r\n\r\n") + 104])
    assert not relay.is_committed
