"""Translates the input items of a Responses request to chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.protocol.translate.custom_tools import custom_arguments
from gateway.protocol.translate.request_reader import (
    assistant_reasoning,
    list_of,
    mapping_of,
    mistyped,
    text_of,
    untranslatable,
)

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""The role of a chat message for each role of an item. Templates of open models do not know
`developer`."""

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_WITHOUT_TEXT = ("web_search_call",)
"""Items that are left out: what a service did by itself, without a text for the model."""
_UNFINISHED = ("in_progress", "incomplete")


def flat_name(namespace: str, name: str) -> str:
    """Return the name that a namespace's function has in chats, which have no namespaces."""
    return f"{namespace}__{name}" if namespace else name


class _Conversation:
    """Builds the list of chat messages from items: one message for each turn of the conversation.

    Reasoning, text and tool calls of one assistant turn become one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []

    def add(self, message: dict[str, Any]) -> None:
        """Append a message of any role to the chat.

        An assistant message also gets the reasoning text that came before it.
        """
        if message["role"] == "assistant":
            self._attach_thoughts(message)
        else:
            self._reasoning = []
        self.messages.append(message)

    def think(self, text: str) -> None:
        """Keep reasoning text, to be added to the next assistant message of the chat."""
        self._reasoning.append(text)

    def call(self, call: dict[str, Any]) -> None:
        """Add a tool call to the last assistant message of the chat, or to a new message."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self._reasoning:
            last = {"role": "assistant", "content": None}
            self.add(last)
        last.setdefault("tool_calls", []).append(call)

    def _attach_thoughts(self, message: dict[str, Any]) -> None:
        if self._reasoning:
            message |= assistant_reasoning("\n".join(self._reasoning))
            self._reasoning = []


def input_messages(value: Any) -> list[dict[str, Any]]:
    """Return the chat messages for the member `input` of a Responses request.

    Raises GatewayError with a message that names the item that cannot be translated.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    conversation = _Conversation()
    for index, item in enumerate(list_of(value, "input")):
        _add_item(mapping_of(item, f"input[{index}]"), f"input[{index}]", conversation)
    return conversation.messages


def is_unfinished(value: Any) -> bool:
    """Return whether the model has to continue the last message of `input`.

    That is so if the message is an answer of the model with an incomplete status.
    """
    if not isinstance(value, list) or not value or not isinstance(value[-1], dict):
        return False
    last = value[-1]
    is_answer = (last.get("type") or "message") == "message" and last.get("role") == "assistant"
    return is_answer and last.get("status") in _UNFINISHED


def join_system_messages(messages: list[dict[str, Any]]) -> None:
    """Join the system messages at the beginning of a chat into one, in place.

    Most chat templates allow only one, at the beginning. The texts are joined as vLLM does for such
    templates: parts of a message by a line break, and messages by an empty line.
    """
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    contents = [message["content"] for message in messages[:count]]
    if count > 1 and all(map(_is_text, contents)):
        joined = "\n\n".join(_joined(content) for content in contents)
        messages[:count] = [{"role": "system", "content": joined}]


def _is_text(content: Any) -> bool:
    return isinstance(content, str) or all(part["type"] == "text" for part in content)


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _add_item(item: Mapping[str, Any], path: str, conversation: _Conversation) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        conversation.add(_message(item, path))
    elif kind in _CALLS:
        conversation.call(_call(item, path))
    elif kind in _RESULTS:
        _add_result(item, path, conversation)
    elif kind == "reasoning":
        if text := _reasoning(item, path):
            conversation.think(text)
    elif kind not in _WITHOUT_TEXT:
        raise untranslatable(f"{path}.type", str(kind))


def _message(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise mistyped(f"{path}.role", "user, assistant, system or developer")
    content = item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    return {"role": role, "content": _compact(_parts(content, f"{path}.content"))}


def _parts(content: Any, path: str) -> list[dict[str, Any]]:
    return [
        _part(mapping_of(part, f"{path}[{index}]"), f"{path}[{index}]")
        for index, part in enumerate(list_of(content, path))
    ]


def _part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = part.get("type")
    if str(kind) in _TEXTS:
        return {"type": "text", "text": text_of(part.get("text"), f"{path}.text")}
    if kind == "refusal":
        return {"type": "text", "text": text_of(part.get("refusal"), f"{path}.refusal")}
    if kind == "input_image":
        if part.get("image_url") is None:
            raise untranslatable(f"{path}.file_id")
        image = {"url": text_of(part["image_url"], f"{path}.image_url")}
        if part.get("detail") is not None:
            image["detail"] = text_of(part["detail"], f"{path}.detail")
        return {"type": "image_url", "image_url": image}
    if kind == "input_audio":
        audio = mapping_of(part.get("input_audio"), f"{path}.input_audio")
        return {"type": "input_audio", "input_audio": audio}
    raise untranslatable(f"{path}.type", str(kind))


def _compact(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    # Return a single text part as a string, which every engine and chat template accepts.
    #
    # So is a list without parts. Any other list is returned unchanged.
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _call(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    namespace = text_of(item.get("namespace") or "", f"{path}.namespace")
    name = flat_name(namespace, text_of(item.get("name"), f"{path}.name"))
    if item.get("type") == "custom_tool_call":
        arguments = custom_arguments(text_of(item.get("input"), f"{path}.input"))
    else:
        arguments = text_of(item.get("arguments"), f"{path}.arguments")
    return {
        "id": text_of(item.get("call_id"), f"{path}.call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _add_result(item: Mapping[str, Any], path: str, conversation: _Conversation) -> None:
    # Add a tool's result as a tool message; its images follow in a user message.
    #
    # A tool message can only contain text.
    output = item.get("output")
    parts = (
        [{"type": "text", "text": output}]
        if isinstance(output, str)
        else _parts(output, f"{path}.output")
    )
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    call = text_of(item.get("call_id"), f"{path}.call_id")
    conversation.add({"role": "tool", "tool_call_id": call, "content": text})
    images = [part for part in parts if part["type"] != "text"]
    if images:
        conversation.add({"role": "user", "content": images})


def _reasoning(item: Mapping[str, Any], path: str) -> str:
    # Return the text of a reasoning item: its content or, without content, its summary.
    for key in ("content", "summary"):
        parts = _parts(item.get(key) or [], f"{path}.{key}")
        if parts:
            return "\n".join(part["text"] for part in parts if part["type"] == "text")
    return ""
