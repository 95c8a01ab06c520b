"""A whole answer as the events that a streaming client expects, for when prefill was already all of it."""

from __future__ import annotations

from typing import Any

import msgspec

_any = msgspec.json.Decoder(dict[str, Any]).decode


def as_events(body: bytes, *, usage: bool) -> bytes:
    """SSE bytes of an answer of one choice, [DONE] included.

    Chat answers get the role and the content in one delta, then the finish reason; usage comes in an event of its own
    when the client asked for it (`stream_options.include_usage`). Tool calls get their number, which only streams show.
    """
    whole = _any(body)
    choice = whole["choices"][0]
    chat = "message" in choice
    kind = "chat.completion.chunk" if chat else whole.get("object", "text_completion")
    head = {
        "id": whole.get("id"),
        "object": kind,
        "created": whole.get("created"),
        "model": whole.get("model"),
    }
    said = {"delta": _delta(choice["message"])} if chat else {"text": choice.get("text", "")}
    nothing: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    events = [
        {
            **head,
            "choices": [
                {"index": 0, **said, "logprobs": choice.get("logprobs"), "finish_reason": None}
            ],
        },
        {
            **head,
            "choices": [{"index": 0, **nothing, "finish_reason": choice.get("finish_reason")}],
        },
    ]
    if usage:
        events.append({**head, "choices": [], "usage": whole.get("usage")})
    return (
        b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        + b"data: [DONE]\n\n"
    )


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
