"""Converts a prefill response to a stream, if the response is already the whole answer.

This happens if the answer ends with its first token. If the client asked for a stream, it gets the
result of `as_events`.
"""

from __future__ import annotations

from typing import Any

import msgspec

_any = msgspec.json.Decoder(dict[str, Any]).decode


def as_events(body: bytes, *, usage: bool) -> bytes:
    """Convert a complete JSON response with one choice to the bytes of server-sent events.

    A chat response becomes one delta with role and content, then the finish reason. Tool calls get
    an index, as in streams. `usage` adds an event with the token usage, for clients that asked for
    it. The last event is [DONE].
    """
    response = _any(body)
    choice = response["choices"][0]
    chat = "message" in choice
    kind = "chat.completion.chunk" if chat else response.get("object", "text_completion")
    head = {
        "id": response.get("id"),
        "object": kind,
        "created": response.get("created"),
        "model": response.get("model"),
    }
    content = {"delta": _delta(choice["message"])} if chat else {"text": choice.get("text", "")}
    no_content: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    events = [
        {
            **head,
            "choices": [
                {"index": 0, **content, "logprobs": choice.get("logprobs"), "finish_reason": None}
            ],
        },
        {
            **head,
            "choices": [{"index": 0, **no_content, "finish_reason": choice.get("finish_reason")}],
        },
    ]
    if usage:
        events.append({**head, "choices": [], "usage": response.get("usage")})
    return (
        b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        + b"data: [DONE]\n\n"
    )


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
