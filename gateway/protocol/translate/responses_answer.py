"""Translates a chat completion to an OpenAI Responses object, and builds the parts for streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.protocol.translate.chat_types import (
    ChatToolCall,
    ChatUsage,
    TranslationError,
    read_answer,
)
from gateway.protocol.translate.custom_tools import custom_input, custom_names
from gateway.protocol.translate.json_pieces import Text, encode_in_pieces, to_text
from gateway.protocol.translate.request_reader import read_object
from gateway.protocol.translate.responses_input import flat_name

_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Members of a request that its response repeats, with their default values."""
_CUT_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The reason of an incomplete response for each finish reason that cuts off an answer."""


def echo(request: bytes) -> dict[str, Any]:
    """Return the members of a request's body that its Responses object repeats.

    The response says that it is not stored, because these engines cannot store it.
    """
    members = read_object(request)
    repeated = {
        name: members[name] if members.get(name) is not None else default
        for name, default in _ECHOED.items()
    }
    reasoning = members.get("reasoning") or {}
    return repeated | {
        "background": False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": False,
    }


def from_chat(body: bytes | bytearray, model: str, echoed: Mapping[str, Any]) -> Iterator[bytes]:
    """Translate a chat completion to a response of `model`; return its JSON in pieces.

    `echoed` is the result of echo(). Raises TranslationError if the completion is malformed.
    """
    answer = read_answer(body)
    if not answer.choices:
        raise TranslationError("The engine's answer contains no choice.")
    choice, key = answer.choices[0], answer.id.removeprefix("chatcmpl-")
    message, output = choice.message, list[dict[str, Any]]()
    if message.thought:
        thought = to_text([message.thought])
        output.append(reasoning_item(f"rs_{key}_{len(output)}", "completed", thought))
    if text := message.content or message.refusal:
        whole = to_text([text])
        part = text_part(whole, choice.token_logprobs) if message.content else refusal_part(whole)
        output.append(message_item(f"msg_{key}_{len(output)}", part, "completed"))
    names, custom = function_names(echoed), custom_names(echoed["tools"])
    for call in message.tool_calls or ():
        number, arguments = f"{key}_{len(output)}", call.function.arguments or ""
        if call.function.name in custom:
            written = to_text([custom_input(arguments)])
            item = custom_item(f"ctc_{number}", call, "completed", written)
        else:
            item = call_item(f"fc_{number}", call, "completed", names, to_text([arguments]))
        output.append(item)
    head = response_head(key, model, answer.created, echoed)
    return encode_in_pieces(
        head
        | ended(choice.finish_reason, output)
        | {"usage": usage_of(answer.usage or ChatUsage())}
    )


def response_head(key: str, model: str, created: int, echoed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of a response in progress, without any output.

    key      the engine's id of the completion
    created  Unix time in seconds
    """
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **echoed,
    }


def ended(finish_reason: str | None, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the members of a Responses object that change at its end: status, details and output.

    If the response was cut off, its status and the status of its last output item are `incomplete`.
    """
    reason = _CUT_REASONS.get(finish_reason or "")
    if reason is not None and output:
        output[-1] = output[-1] | {"status": "incomplete"}
    return {
        "status": "completed" if reason is None else "incomplete",
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": output,
    }


def last_status(finish_reason: str | None) -> str:
    """Return the status of an answer's last output item, given the answer's finish reason."""
    return "incomplete" if finish_reason in _CUT_REASONS else "completed"


def usage_of(usage: ChatUsage) -> dict[str, Any]:
    """Return an engine's token counts under the names of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def text_part(text: Text, logprobs: Sequence[msgspec.Raw] = ()) -> dict[str, Any]:
    """Return a content part of the Responses API with this text and its log probabilities."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def refusal_part(text: Text) -> dict[str, Any]:
    """Return a content part of the Responses API in which the model refuses the request."""
    return {"type": "refusal", "refusal": text}


def message_item(item_id: str, part: dict[str, Any] | None, status: str) -> dict[str, Any]:
    """Return a message as an output item, with one content part, or none if `part` is None."""
    content = [] if part is None else [part]
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def reasoning_item(item_id: str, status: str, text: Text | None) -> dict[str, Any]:
    """Return an output item with reasoning text, or without content if `text` is None."""
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [] if text is None else [{"type": "reasoning_text", "text": text}],
    }


def function_names(echoed: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]]:
    """Map the engine's name of each namespaced function to the client's `name` and `namespace`.

    Engines do not know namespaces, so the function has another name there. `echoed` is the result
    of echo().
    """
    groups = [tool for tool in echoed["tools"] if tool.get("type") == "namespace"]
    return {
        flat_name(group["name"], tool["name"]): {"name": tool["name"], "namespace": group["name"]}
        for group in groups
        for tool in group["tools"]
    }


def call_item(
    item_id: str,
    call: ChatToolCall,
    status: str,
    names: Mapping[str, Mapping[str, str]],
    arguments: Text,
) -> dict[str, Any]:
    """Return a function call as an output item, with the arguments received so far.

    `names` is the result of function_names().
    """
    name = call.function.name or ""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id or "",
        **names.get(name, {"name": name}),
        "arguments": arguments,
    }


def custom_item(item_id: str, call: ChatToolCall, status: str, text: Text) -> dict[str, Any]:
    """Return the call of a custom tool as an output item, with its input."""
    return {
        "id": item_id,
        "type": "custom_tool_call",
        "status": status,
        "call_id": call.id or "",
        "name": call.function.name or "",
        "input": text,
    }
