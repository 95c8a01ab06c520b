"""Translates the conversation of an Anthropic Messages request to chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.protocol.translate.request_reader import (
    assistant_reasoning,
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

_ROLES: Mapping[str, str] = {
    **{role: role for role in ("user", "assistant", "system")},
    **dict.fromkeys(("ctx", "msg"), "user"),
}
"""The role of each message. Claude Code sends `ctx` and `msg` for texts of its own, as vLLM's own
Messages API knows."""


def system_text(system: Any, messages: Sequence[Any]) -> str:
    """Return the system prompt as one text.

    It consists of the text of `system` and of the system messages at the start of `messages`. Chat
    templates allow only one system message, at the beginning.
    """
    texts = [_system_text(system, "system")] if system is not None else []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "system":
            break
        texts.append(_system_text(message.get("content"), f"messages[{index}].content"))
    return "".join(texts)


def _system_text(content: Any, path: str) -> str:
    return "".join(text for text in _texts(content, path) if not text.startswith(BILLING_LINE))


def _texts(content: Any, path: str) -> list[str]:
    # Return the texts of a content, which may be a string or a list of text blocks.
    #
    # Raises GatewayError for other kinds of blocks.
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

    One message may become several, because each tool result becomes a separate message. Raises
    GatewayError with a message that names what cannot be translated.
    """
    conversation = _Conversation()
    for index, message in enumerate(list_of(messages, "messages")):
        path = f"messages[{index}]"
        role = _ROLES.get(str(mapping_of(message, path).get("role")))
        content, path = message.get("content"), f"{path}.content"
        if role == "user":
            conversation.add_user(_user(content, path))
        elif role == "assistant":
            conversation.add_assistant(_assistant(content, path))
        elif role == "system":
            conversation.add_system(_system_text(content, path))
        else:
            raise mistyped(f"messages[{index}].role", "user or assistant")
    return conversation.finish()


class _Conversation:
    """Builds the list of chat messages from an Anthropic conversation, message by message.

    Agents append system messages with almost every turn. If these were moved to the beginning, the
    start of the prompt would change each time, and no cached prefix could be used. Therefore their
    text is added to the neighbouring message, so that each prompt begins with the previous one.
    """

    def __init__(self) -> None:
        self._chat: list[dict[str, Any]] = []
        self._waiting: list[str] = []  # system text that belongs to the next message
        self._is_leading = True

    def add_user(self, messages: list[dict[str, Any]]) -> None:
        """Append the messages of a user's turn to the chat: tool results, then the user's text."""
        if self._waiting and messages:
            last = messages[-1]
            texts = (*self._waiting, last["content"])
            is_user = last["role"] == "user"
            last["content"] = _joined(*(texts if is_user else (texts[-1], *texts[:-1])))
            self._waiting = []
        self._chat += messages
        self._is_leading = False

    def add_assistant(self, message: dict[str, Any]) -> None:
        """Append an assistant message, with its text and tool calls, to the chat."""
        self._end_user_turn()
        self._chat.append(message)
        self._is_leading = False

    def add_system(self, text: str) -> None:
        """Add the text of a system message to the neighbouring message of the chat.

        A system message before all other messages is ignored here, because it belongs to the system
        prompt.
        """
        if self._is_leading or not text:
            return
        last = self._chat[-1] if self._chat else {}
        if last.get("role") in ("user", "tool") and not self._waiting:
            last["content"] = _joined(last["content"], text)
        else:
            self._waiting.append(text)

    def finish(self) -> list[dict[str, Any]]:
        """Return all chat messages of the conversation. Call this once, after the last message."""
        self._end_user_turn()
        return self._chat

    def _end_user_turn(self) -> None:
        if self._waiting:
            self._chat.append({"role": "user", "content": _joined(*self._waiting)})
            self._waiting = []


def _joined(*contents: Any) -> Any:
    # Join message contents: return a text, or a list of parts if one of them is a list.
    #
    # Adjacent texts are merged, because some chat templates write parts without a separator.
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(filter(None, contents))
    parts: list[dict[str, Any]] = []
    for content in filter(None, contents):
        added = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if parts and added and parts[-1].get("type") == added[0].get("type") == "text":
            first = added.pop(0)
            parts[-1] = parts[-1] | {"text": f"{parts[-1]['text']}\n\n{first['text']}"}
        parts += added
    return parts


def _blocks(content: Any, path: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        mapping_of(block, f"{path}[{index}]") for index, block in enumerate(list_of(content, path))
    ]


def _user(content: Any, path: str) -> list[dict[str, Any]]:
    # Return a user message as chat messages: tool results first, then the user's content.
    #
    # Images in tool results follow all results, in the user's message.
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
    # Return the text of a tool result, and its images, which a tool message cannot contain.
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
        _check_transformations(block.get("transformations") or {}, f"{path}.transformations")
        source = mapping_of(block.get("source"), f"{path}.source")
        return {"type": "image_url", "image_url": {"url": _image_url(source, f"{path}.source")}}
    if kind == "document":
        return {"type": "text", "text": _document(block, path)}
    if kind == "search_result":
        return {"type": "text", "text": _search_result(block, path)}
    if kind == "tool_reference":
        return {"type": "text", "text": text_of(block.get("tool_name"), f"{path}.tool_name")}
    raise untranslatable(f"{path}.type", str(kind))


def _check_transformations(value: Any, path: str) -> None:
    # Raise GatewayError unless images that are too large may be scaled down, as engines do.
    for name, wanted in mapping_of(value, path).items():
        if (name, wanted) != ("oversized_image", "downsize"):
            raise untranslatable(f"{path}.{name}", str(wanted))


def _image_url(source: Mapping[str, Any], path: str) -> str:
    kind = source.get("type")
    if kind == "url":
        return text_of(source.get("url"), f"{path}.url")
    if kind != "base64":
        raise untranslatable(f"{path}.type", str(kind))
    media = text_of(source.get("media_type"), f"{path}.media_type")
    return f"data:{media};base64,{text_of(source.get('data'), f'{path}.data')}"


def _document(block: Mapping[str, Any], path: str) -> str:
    # Return the text of a document block, below its title and context.
    #
    # Raises GatewayError for PDFs and files.
    return "\n".join([*_heads(block, ("title", "context"), path), _document_text(block, path)])


def _document_text(block: Mapping[str, Any], path: str) -> str:
    source = mapping_of(block.get("source"), f"{path}.source")
    if source.get("type") == "text":
        return text_of(source.get("data"), f"{path}.source.data")
    if source.get("type") != "content":
        raise untranslatable(f"{path}.source.type", str(source.get("type")))
    return "\n".join(_texts(source.get("content"), f"{path}.source.content"))


def _search_result(block: Mapping[str, Any], path: str) -> str:
    # Return the text of a search result, below its title and source.
    heads = _heads(block, ("title", "source"), path)
    return "\n".join(filter(None, [*heads, *_texts(block.get("content"), f"{path}.content")]))


def _heads(block: Mapping[str, Any], names: tuple[str, ...], path: str) -> list[str]:
    # Return the texts of these members that the block has.
    return [text_of(block[name], f"{path}.{name}") for name in names if block.get(name)]


def _assistant(content: Any, path: str) -> dict[str, Any]:
    # Return an assistant message as a chat message with its reasoning and tool calls.
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for index, block in enumerate(_blocks(content, path)):
        where, kind = f"{path}[{index}]", block.get("type")
        if kind == "thinking":
            reasoning.append(text_of(block.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            calls.append(_tool_call(block, where))
        elif kind != "redacted_thinking":
            parts.append(_part(block, where))
    message: dict[str, Any] = {"role": "assistant"}
    if reasoning:
        message |= assistant_reasoning("".join(reasoning))
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
    # Return a single text part as a string, which every engine and chat template accepts.
    #
    # Any other list of parts is returned unchanged.
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
