"""Chat completions as an engine sends them, and readers of translated streams, for tests."""

from __future__ import annotations

import json
from typing import Any

from gateway.protocol.translate.translator import StreamTranslator

Piece = tuple[str, Any]
"""A part of an answer: ("thought", text), ("text", text), or ("call", (name, arguments))."""

USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 30,
    "total_tokens": 150,
    "prompt_tokens_details": {"cached_tokens": 100},
    "completion_tokens_details": {"reasoning_tokens": 7},
}


def answer(pieces: list[Piece], finish: str = "stop", **choice: Any) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for key, name in (("reasoning", "thought"), ("content", "text")):
        if texts := [text for kind, text in pieces if kind == name]:
            message[key] = "".join(texts)
    calls = [value for kind, value in pieces if kind == "call"]
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    body = {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1795177574,
        "model": "engine-name",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}],
        "usage": USAGE,
    }
    return json.dumps(body).encode()


def stream(pieces: list[Piece], finish: str = "stop", size: int = 3, **choice: Any) -> bytes:
    events = [chunk({"role": "assistant", "content": ""})]
    calls = 0
    for kind, value in pieces:
        if kind == "call":
            name, arguments = value
            head = {"index": calls, "id": f"call_{calls}", "type": "function"}
            events.append(
                chunk({"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]})
            )
            events += [
                chunk({"tool_calls": [{"index": calls, "function": {"arguments": part}}]})
                for part in _cut(arguments, size)
            ]
            calls += 1
        else:
            member = "reasoning" if kind == "thought" else "content"
            events += [chunk({member: part}) for part in _cut(value, size)]
    events.append(chunk({}, finish_reason=finish, **choice))
    events.append(_event({"id": "chatcmpl-7", "created": 1, "choices": [], "usage": USAGE}))
    return b"".join(events) + b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], **choice: Any) -> bytes:
    data = {"id": "chatcmpl-7", "created": 1795177574, "model": "engine-name"}
    choices = [{"index": 0, "delta": delta, "finish_reason": None, **choice}]
    return _event({**data, "choices": choices})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def events(data: bytes) -> list[dict[str, Any]]:
    # Decode translated events. Asserts that each event's name is its type.
    decoded = []
    for event in data.decode().split("\n\n")[:-1]:
        name, _, line = event.partition("\n")
        value = json.loads(line.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        decoded.append(value)
    return decoded


def message_of(data: bytes) -> dict[str, Any]:
    # Return the message that a client assembles from events. Asserts that their order is valid.
    first, *others = events(data)
    assert first["type"] == "message_start"
    message, open_block = first["message"], None
    for event in others:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append({**event["content_block"], "partial": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                _apply(message["content"][open_block], event["delta"])
            case "content_block_stop":
                assert event["index"] == open_block
                block, open_block = message["content"][event["index"]], None
                partial = block.pop("partial")
                if block["type"] == "tool_use":
                    block["input"] = json.loads(partial or "{}")
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert open_block is None
    assert others[-1]["type"] == "message_stop"
    return dict(message)


def _apply(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    if delta["type"] == "input_json_delta":
        block["partial"] += delta["partial_json"]
    else:
        member = kinds[delta["type"]]
        block[member] += delta[member]


def response_of(data: bytes) -> dict[str, Any]:
    # Return the response in the last event. Asserts that the earlier events add up to it.
    decoded = events(data)
    assert [event["sequence_number"] for event in decoded] == list(range(len(decoded)))
    assert [event["type"] for event in decoded[:2]] == [
        "response.created",
        "response.in_progress",
    ]
    texts: dict[tuple[str, int], str] = {}
    done: list[dict[str, Any]] = []
    for event in decoded[2:-1]:
        place = (event.get("item_id", ""), event.get("content_index", 0))
        name = event["type"].removeprefix("response.")
        if name.endswith(".delta"):
            texts[place] = texts.get(place, "") + event["delta"]
        elif name in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts[place]
        elif name == "function_call_arguments.done":
            assert event["arguments"] == texts.get(place, "")
        elif name == "custom_tool_call_input.done":
            assert event["input"] == texts[place]
        elif name == "output_item.added":
            assert event["output_index"] == len(done)
        elif name == "output_item.done":
            done.append(event["item"])
    last = decoded[-1]["response"]
    assert [item["id"] for item in last["output"]] == [item["id"] for item in done]
    return dict(last)


def feed(translator: StreamTranslator, data: bytes) -> bytes:
    return b"".join(translator.feed(data))


def finish(translator: StreamTranslator) -> bytes:
    return b"".join(translator.finish())
