"""Translates the conversation of an Anthropic Messages request to chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.protocol.translate.request_reader import (
    encode,
    list_of,
    mapping_of,
    mistyped,
    text_of,
    untranslatable,
)

# A line that Claude Code puts into its system prompt. It has a hash of each request, which would
# make every prompt new to the engines' caches; vLLM's own Messages API removes it too.
BILLING_LINE = "x-anthropic-billing-header"


def system_text(system: Any, messages: Sequence[Any]) -> str:
    """Return the text of `system`, followed by that of system messages in the conversation.

    Chat templates allow one system message, at the beginning.
    """
    parts = _texts(system, "system") if system is not None else []
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "system":
            parts += _texts(message.get("content"), f"messages[{index}].content")
    return "".join(part for part in parts if not part.startswith(BILLING_LINE))


def _texts(content: Any, path: str) -> list[str]:
    """Return the texts of a content, which may be a string or a list of text blocks.

    Raises GatewayError for other kinds of blocks.
    """
    if isinstance(content, str):
        return [content]
    texts = []
    for index, block in enumerate(list_of(content, path)):
        kind = mapping_of(block, f"{path}[{index}]").get("type")
        if kind != "text":
            raise untranslatable(f"{path}[{index}].type", str(kind))
        texts.append(text_of(block.get("text"), f"{path}[{index}].text"))
    return texts


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation, without its system prompt.

    One message may become several: each tool result is a message of its own. Raises GatewayError
    that names what cannot be translated.
    """
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(list_of(messages, "messages")):
        path = f"messages[{index}]"
        role = mapping_of(message, path).get("role")
        if role == "user":
            chat += _user(message.get("content"), f"{path}.content")
        elif role == "assistant":
            chat.append(_assistant(message.get("content"), f"{path}.content"))
        elif role != "system":
            raise mistyped(f"{path}.role", "user or assistant")
    return chat


def _blocks(content: Any, path: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        mapping_of(block, f"{path}[{index}]") for index, block in enumerate(list_of(content, path))
    ]


def _user(content: Any, path: str) -> list[dict[str, Any]]:
    """Return a user message as chat messages: tool results first, then the user's content.

    Images in tool results follow all results, in the user's message.
    """
    results: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(content, path)):
        where = f"{path}[{index}]"
        if block.get("type") == "tool_result":
            text, shown = _tool_result(block.get("content"), f"{where}.content")
            call = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
            results.append({"role": "tool", "tool_call_id": call, "content": text})
            images += shown
        else:
            parts.append(_part(block, where))
    if images or parts:
        results.append({"role": "user", "content": _compact([*images, *parts])})
    return results


def _tool_result(content: Any, path: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a tool result, and its images, which a tool message cannot contain."""
    if content is None:
        return "", []
    parts = [_part(block, f"{path}[{index}]") for index, block in enumerate(_blocks(content, path))]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts), [part for part in parts if part["type"] != "text"]


def _part(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": text_of(block.get("text"), f"{path}.text")}
    if kind == "image":
        source = mapping_of(block.get("source"), f"{path}.source")
        return {"type": "image_url", "image_url": {"url": _image_url(source, f"{path}.source")}}
    if kind == "document":
        return {"type": "text", "text": _document(block, path)}
    raise untranslatable(f"{path}.type", str(kind))


def _image_url(source: Mapping[str, Any], path: str) -> str:
    kind = source.get("type")
    if kind == "url":
        return text_of(source.get("url"), f"{path}.url")
    if kind != "base64":
        raise untranslatable(f"{path}.type", str(kind))
    media = text_of(source.get("media_type"), f"{path}.media_type")
    return f"data:{media};base64,{text_of(source.get('data'), f'{path}.data')}"


def _document(block: Mapping[str, Any], path: str) -> str:
    """Return the text of a document block. Raises GatewayError for PDFs and files."""
    source = mapping_of(block.get("source"), f"{path}.source")
    if source.get("type") == "text":
        return text_of(source.get("data"), f"{path}.source.data")
    if source.get("type") != "content":
        raise untranslatable(f"{path}.source.type", str(source.get("type")))
    return "\n".join(_texts(source.get("content"), f"{path}.source.content"))


def _assistant(content: Any, path: str) -> dict[str, Any]:
    """Return an assistant message as a chat message with its reasoning and tool calls."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(_blocks(content, path)):
        where, kind = f"{path}[{index}]", block.get("type")
        if kind == "thinking":
            thoughts.append(text_of(block.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            calls.append(_tool_call(block, where))
        elif kind != "redacted_thinking":
            parts.append(_part(block, where))
    message: dict[str, Any] = {"role": "assistant"}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    message["content"] = _compact(parts) if parts else None if calls else ""
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    name = text_of(block.get("name"), f"{path}.name")
    arguments = encode(mapping_of(block.get("input"), f"{path}.input")).decode()
    return {
        "id": text_of(block.get("id"), f"{path}.id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _compact(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a single text part as a string, which every engine and chat template accepts.

    Any other list of parts is returned unchanged.
    """
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
