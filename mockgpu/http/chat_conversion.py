"""Converts requests of other APIs (Messages, Responses, audio) to chat requests.

The functions here convert text parts, tool definitions, tool calls and tool results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mockgpu.request_parser import ApiError, RequestBody, decode_body


def read_members(raw: bytes) -> dict[str, Any]:
    """Parse a JSON request body, and return its fields as a dict.

    Raises ApiError if the body is not a JSON object.
    """
    return decode_body(raw, dict[str, Any])


def chat_body(members: Mapping[str, Any]) -> RequestBody:
    """Build a chat request from its JSON fields. Raises ApiError if a field is invalid."""
    try:
        return msgspec.convert(dict(members), RequestBody)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"1 validation error: {error}") from None


def chat_of(text: str, model: object, **members: Any) -> RequestBody:
    """Return a chat request with `text` as its only message, sent by the user.

    Raises ApiError if the request is invalid.
    """
    return chat_body({"model": model, "messages": [{"role": "user", "content": text}], **members})


def flat_text(content: object, kinds: Sequence[str]) -> object:
    """Join the text of content parts, one part per line, and return it.

    A part is text if its type is in `kinds`. If any part is not text, such as an image, the
    function returns `content` unchanged.
    """
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") in kinds for part in content):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def chat_turns(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    results = [_result(block) for block in blocks if _kind(block) == "tool_result"]
    calls = [
        chat_call(block.get("id"), block.get("name"), _json(block.get("input")))
        for block in blocks
        if _kind(block) == "tool_use"
    ]
    others = [block for block in blocks if _kind(block) not in ("tool_result", "tool_use")]
    if not results and not calls:
        return [{**message, "content": flat_text(content, ("text",))}]
    text: Any = flat_text(others, ("text",)) if others else None
    if calls:
        return [*results, {"role": message.get("role"), "content": text, "tool_calls": calls}]
    return [*results, *([{"role": message.get("role"), "content": text}] if others else [])]


def chat_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """Return a tool call in the format of an assistant message in a chat."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def chat_tool(tool: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Convert a tool definition to the format of the chat API.

    `schema` is the name of the field that contains the JSON Schema of the tool's parameters.
    """
    names = {"name": "name", "description": "description", schema: "parameters", "strict": "strict"}
    function = {other: tool[name] for name, other in names.items() if tool.get(name) is not None}
    return {"type": "function", "function": function}


def join_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with each tool call moved into the assistant message before it.

    In the chat API, a tool call is part of a message, not a message of its own.
    """
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            joined.append(message)
    return joined


def _kind(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else None


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = flat_text(block.get("content"), ("text",))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
