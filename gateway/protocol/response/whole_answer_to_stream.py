"""Converts a whole JSON answer to a stream, for engines that do not stream as requested. No I/O.

Some engines answer a request for a stream with one JSON document, for example because a feature
such as tools excludes streaming there. The SDKs of clients would read no event from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.protocol.response.held_answer import HeldAnswer
from gateway.protocol.response.http_response_parser import (
    LAST_CHUNK,
    ResponseHead,
    encode_chunk,
    parse_head,
)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_DONE = b"data: [DONE]\n\n"
_RESPONSE_ENDS = frozenset(("completed", "incomplete", "failed", "cancelled"))

STREAM_HEAD = parse_head(
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
)
"""The head of the response that the events replace the engine's response with."""

EventWriter = Callable[[dict[str, Any]], Iterator[bytes]]
"""A function that yields the events for a decoded answer; none if it is no answer of the API."""


def as_stream(held: HeldAnswer, write: EventWriter) -> tuple[ResponseHead, bytes] | None:
    """Convert a whole answer to a stream, as the client requested one; return its head and body.

    The body has the chunked encoding. Returns None if the answer does not belong to the API.

    held   the whole answer of the engine
    write  function that yields the events of the API for an answer
    """
    events = _write_events(held.payload, write)
    if not events:
        return None
    keep_alive = held.head.keep_alive and not held.surplus_bytes
    return replace(STREAM_HEAD, keep_alive=keep_alive), encode_chunk(events) + LAST_CHUNK


def _write_events(answer: bytes | bytearray, write: EventWriter) -> bytes:
    try:
        decoded = _decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            decoded = json.loads(answer.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            return b""
    try:
        return b"".join(write(decoded)) if isinstance(decoded, dict) else b""
    except (AttributeError, KeyError, TypeError, UnicodeEncodeError):  # members of other types
        return b""


def write_chunks(answer: dict[str, Any]) -> Iterator[bytes]:
    """Yield the chunks of a chat or completion, without token counts."""
    return _chunks(answer, shows_usage=False)


def write_chunks_with_usage(answer: dict[str, Any]) -> Iterator[bytes]:
    """Yield the chunks of a chat or completion, and its token counts as the last one."""
    return _chunks(answer, shows_usage=True)


def _chunks(answer: dict[str, Any], *, shows_usage: bool) -> Iterator[bytes]:
    choices = answer.pop("choices", None)
    if not isinstance(choices, list) or not choices:
        return
    usage, prompt_ids = answer.pop("usage", None), answer.pop("prompt_token_ids", None)
    if answer.get("object") == "chat.completion":
        answer["object"] = "chat.completion.chunk"
    if shows_usage:
        answer["usage"] = None
    first = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
    empty: dict[str, Any]
    for number, choice in enumerate(choices):
        choice.setdefault("index", number)  # without it, clients would join all choices to one
        end = {
            name: choice.pop(name)
            for name in ("finish_reason", "stop_reason")
            if choice.get(name) is not None
        }
        if "message" in choice:
            choice["delta"], empty = _delta(choice.pop("message")), {"delta": {}}
        else:
            empty = {"text": ""}
        yield _data(answer | first | {"choices": [choice | {"finish_reason": None}]})
        first = {}
        last = {"index": choice["index"], **empty, "logprobs": None, "finish_reason": "stop"}
        yield _data(answer | {"choices": [last | end]})
    if shows_usage and usage is not None:
        yield _data(answer | {"choices": [], "usage": usage})
    yield _DONE


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    delta = {name: value for name, value in message.items() if value is not None and value != []}
    if "tool_calls" in delta:
        calls = enumerate(delta["tool_calls"])
        delta["tool_calls"] = [{"index": index} | call for index, call in calls]
    return {"role": "assistant"} | delta


def write_message(answer: dict[str, Any]) -> Iterator[bytes]:
    """Yield the stream events that together carry a whole message of Anthropic's API."""
    content: Any = answer.get("content")
    usage: dict[str, Any] = answer.get("usage") or {}
    if answer.get("type") != "message" or not isinstance(content, list):
        return
    start: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    start |= {"usage": usage | {"output_tokens": 0}}
    yield _event("message_start", {"message": answer | start})
    for index, block in enumerate(content):
        position = {"index": index}
        empty, deltas = _block(block)
        yield _event("content_block_start", position | {"content_block": empty})
        for delta in deltas:
            yield _event("content_block_delta", position | {"delta": delta})
        yield _event("content_block_stop", position)
    delta = {name: answer.get(name) for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", {"delta": delta, "usage": usage})
    yield _event("message_stop", {})


def _block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    # Return a content block without its content, and the deltas that add it.
    kind = block["type"]
    if kind == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if kind == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        signature = {"type": "signature_delta", "signature": block.get("signature") or ""}
        return block | {"thinking": "", "signature": ""}, [*deltas, signature]
    if kind == "tool_use":
        arguments = _encode(block["input"]).decode()
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return block, []


def write_response(answer: dict[str, Any]) -> Iterator[bytes]:
    """Yield the numbered events of a Responses object that has ended."""
    output, status = answer.get("output"), answer.get("status")
    if not isinstance(output, list) or status not in _RESPONSE_ENDS:
        return
    for sequence, (name, members) in enumerate(_response_events(answer, output, status)):
        yield _event(name, {"sequence_number": sequence} | members)


def _response_events(
    answer: dict[str, Any], output: list[dict[str, Any]], status: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    start = answer | {"status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": start}
    yield "response.in_progress", {"response": start}
    for index, item in enumerate(output):
        position = {"item_id": item.get("id"), "output_index": index}
        begun = item | ({"status": "in_progress"} if "status" in item else {})
        if item["type"] == "function_call":
            begun["arguments"] = ""
        if item["type"] in ("message", "reasoning"):
            begun["content"] = []
        yield "response.output_item.added", {"output_index": index, "item": begun}
        if item["type"] == "function_call":
            arguments, name = item["arguments"], {"name": item["name"]}
            yield "response.function_call_arguments.delta", position | {"delta": arguments}
            done = position | name | {"arguments": arguments}
            yield "response.function_call_arguments.done", done
        if item["type"] in ("message", "reasoning"):
            for content_index, part in enumerate(item.get("content") or ()):
                yield from _part_events(position | {"content_index": content_index}, part)
        yield "response.output_item.done", {"output_index": index, "item": item}
    end = "failed" if status == "cancelled" else status
    yield f"response.{end}", {"response": answer}


def _part_events(
    position: dict[str, Any], part: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    kind: str = part["type"]
    member = "refusal" if kind == "refusal" else "text"
    text = part[member]
    logprobs = {"logprobs": part.get("logprobs") or []} if kind == "output_text" else {}
    yield "response.content_part.added", position | {"part": part | {member: ""}}
    yield f"response.{kind}.delta", position | {"delta": text} | logprobs
    yield f"response.{kind}.done", position | {member: text} | logprobs
    yield "response.content_part.done", position | {"part": part}


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)


def _event(name: str, members: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name} | members))
