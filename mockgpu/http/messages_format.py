"""Anthropic's Messages API as vLLM serves it: requests become chats, and are converted back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import dropwhile
from typing import Any

import msgspec

from mockgpu.http.chat_conversion import chat_body, chat_tool, chat_turns
from mockgpu.http.choice_and_stop_reason import Choice
from mockgpu.http.named_events import named_event
from mockgpu.http.openai_format import http_chunk
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody

_PASSED = ("model", "max_tokens", "stream", "temperature", "top_p", "kv_transfer_params")
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Converts requests of the Messages API to chat requests, and generated answers back."""

    prefix = "msg_"

    def read(self, members: dict[str, Any]) -> RequestBody:
        if not isinstance(members.get("max_tokens"), int):
            raise ApiError(400, "1 validation error: max_tokens: field required", "max_tokens")
        return count_body(members)

    def chunks(
        self, parsed: ParsedRequest, choice: Choice, created: int, members: Mapping[str, Any]
    ) -> MessagesChunks:
        return MessagesChunks(parsed, choice)

    def whole(
        self,
        parsed: ParsedRequest,
        choice: Choice,
        created: int,
        cached: int | None,
        members: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the message object of a response that is not streamed."""
        block: dict[str, Any] = {"type": "text", "text": choice.whole_text}
        if parsed.tool is not None:
            block = _tool_use(parsed, msgspec.json.decode(choice.whole_text))
        usage = _usage(parsed, choice.output_tokens, cached)
        return _message(parsed, [block], usage) | _ending(choice)

    def error(self, error: ApiError) -> bytes:
        detail = {"type": error.kind, "message": error.message}
        return msgspec.json.encode({"type": "error", "error": detail})

    def failure(self, error: ApiError) -> bytes:
        """Return the error event that ends a failed stream of the Messages API."""
        detail = {"type": "internal_error", "message": error.message}
        return http_chunk(named_event("error", {"type": "error", "error": detail}))


class MessagesChunks:
    """Builds the stream events of one message in the Messages API.

    A message has one content block. Each token is one `content_block_delta` event.
    """

    __slots__ = ("_choice", "_made", "_parsed")

    def __init__(self, parsed: ParsedRequest, choice: Choice) -> None:
        self._parsed, self._choice = parsed, choice
        self._made = 0

    def begin(self) -> bytes:
        return b""

    def next(self, cached: int | None) -> bytes:
        """Return the events for the next token as one HTTP chunk.

        The first call also returns the events that start the message and its content block.
        """
        piece = self._choice.piece(self._made)
        self._made += 1
        opening = self._opening(cached) if self._made == 1 else b""
        return http_chunk(opening + (self._delta(piece) if piece else b""))

    def end(self, cached: int | None) -> bytes:
        """Return the last events of a stream, which end the content block and the message."""
        usage = _usage(self._parsed, self._choice.output_tokens, cached)
        delta = {"type": "message_delta", "delta": _ending(self._choice), "usage": usage}
        return http_chunk(
            named_event("content_block_stop", {"type": "content_block_stop", "index": 0})
            + named_event("message_delta", delta)
            + named_event("message_stop", {"type": "message_stop"})
        )

    def _opening(self, cached: int | None) -> bytes:
        message = _message(self._parsed, [], _usage(self._parsed, 0, cached))
        start = named_event("message_start", {"type": "message_start", "message": message})
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self._parsed.tool is not None:
            block = _tool_use(self._parsed, {})
        data = {"type": "content_block_start", "index": 0, "content_block": block}
        return start + named_event("content_block_start", data)

    def _delta(self, piece: str) -> bytes:
        delta = (
            {"type": "input_json_delta", "partial_json": piece}
            if self._parsed.tool is not None
            else {"type": "text_delta", "text": piece}
        )
        data = {"type": "content_block_delta", "index": 0, "delta": delta}
        return named_event("content_block_delta", data)


def count_body(members: Mapping[str, Any]) -> RequestBody:
    """Parse the body of a count_tokens request into a chat request; `max_tokens` is optional."""
    messages = members.get("messages")
    if not isinstance(messages, list):
        raise ApiError(400, "1 validation error: messages: field required", "messages")
    chat: dict[str, Any] = {name: members[name] for name in _PASSED if name in members}
    chat["messages"] = _chat_messages(members.get("system"), messages)
    chat["stop"] = members.get("stop_sequences")
    chat["response_format"] = _response_format(members)
    if members.get("tools"):
        chat["tools"] = [chat_tool(tool, "input_schema") for tool in members["tools"]]
        chat["tool_choice"] = _tool_choice(members.get("tool_choice"))
    return chat_body(chat)


def _chat_messages(system: object, messages: list[Any]) -> list[Any]:
    # Return the chat messages of a conversation, beginning with its system prompt.
    #
    # A system message after the first message is merged into a neighbouring message.
    if not all(isinstance(message, dict) for message in messages):
        raise ApiError(
            400, "1 validation error: messages: each message must be an object", "messages"
        )
    rest = list(dropwhile(_is_system, messages))
    leading = [message.get("content") for message in messages[: len(messages) - len(rest)]]
    texts = [_system_text(each) for each in (system, *leading) if each is not None]
    chat: list[dict[str, Any]] = [{"role": "system", "content": "".join(texts)}] if texts else []
    waiting: list[str] = []
    for message in rest:
        if not _is_system(message):
            chat += _with_waiting(chat_turns(message), waiting)
        elif chat[-1]["role"] == "assistant" or waiting:
            waiting.append(_system_text(message.get("content")))
        else:
            chat[-1]["content"] = _joined([chat[-1]["content"], _system_text(message["content"])])
    return [*chat, *_with_waiting([], waiting)]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system"


def _system_text(content: object) -> str:
    # Return the text of a system prompt, without the billing line that Claude Code adds.
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [str(block.get("text", "")) for block in blocks if isinstance(block, dict)]
    return "".join(text for text in texts if not text.startswith("x-anthropic-billing-header"))


def _with_waiting(turns: list[dict[str, Any]], waiting: list[str]) -> list[dict[str, Any]]:
    # Return the messages of a turn, with the `waiting` system texts merged into them.
    #
    # The system texts came after an answer of the assistant. The list `waiting` is emptied.
    texts = [text for text in waiting if text]
    waiting.clear()
    if not texts:
        return turns
    if not turns or turns[-1]["role"] == "assistant":
        return [{"role": "user", "content": _joined(texts)}, *turns]
    last, is_tool = turns[-1], turns[-1]["role"] == "tool"
    pieces = [last["content"], *texts] if is_tool else [*texts, last["content"]]
    return [*turns[:-1], last | {"content": _joined(pieces)}]


def _joined(contents: list[Any]) -> Any:
    # Join message contents into one: a text, or a list of parts if one of them is a list.
    #
    # Adjacent texts become one text, because some chat templates write parts without a separator.
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


def _response_format(members: Mapping[str, Any]) -> dict[str, Any] | None:
    config = members.get("output_config")
    form = config.get("format") if isinstance(config, dict) else None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return None
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _tool_choice(choice: object) -> Any:
    if not isinstance(choice, dict):
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"any": "required", "auto": "auto", "none": "none"}.get(str(choice.get("type")))


def _message(
    parsed: ParsedRequest, content: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": parsed.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": parsed.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _ending(choice: Choice) -> dict[str, Any]:
    reason = _STOP_REASONS.get(choice.finish_reason, "end_turn")
    if choice.stop_reason is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_reason}


def _tool_use(parsed: ParsedRequest, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{parsed.id}", "name": parsed.tool, "input": arguments}


def _usage(parsed: ParsedRequest, output_tokens: int, cached: int | None) -> dict[str, int]:
    usage = {"input_tokens": parsed.prompt_tokens, "output_tokens": output_tokens}
    if cached is not None:
        usage["input_tokens"] -= max(0, cached)
        usage["cache_read_input_tokens"] = max(0, cached)
    return usage
