"""Translates chat completions to Anthropic messages: whole answers, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.protocol.error_formats import ANTHROPIC_TYPES
from gateway.protocol.translate.chat_types import (
    ChatAnswer,
    ChatChoice,
    ChatToolCall,
    ChatUsage,
    ErrorDetail,
    TranslationError,
    read_answer,
    read_error,
)
from gateway.protocol.translate.json_pieces import encode_in_pieces, to_text
from gateway.protocol.translate.request_reader import encode
from gateway.protocol.translate.sse import format_event
from gateway.protocol.translate.translator import StreamTranslator

_STOP_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "length": "max_tokens",
        "tool_calls": "tool_use",
        "function_call": "tool_use",
        "content_filter": "refusal",
    }
)
_ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {**ANTHROPIC_TYPES, 504: "timeout_error", 529: "overloaded_error"}
)
_TYPES_IN_STREAM: Mapping[str, str] = MappingProxyType(
    {
        "invalid_request_error": "invalid_request_error",
        "BadRequestError": "invalid_request_error",
        "overloaded_error": "overloaded_error",
        "rate_limit_error": "rate_limit_error",
        "service_unavailable_error": "overloaded_error",
    }
)
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def from_chat(body: bytes | bytearray, model: str) -> Iterator[bytes]:
    """Translate a chat completion to an Anthropic message of `model`; return its JSON in pieces.

    Raises TranslationError if the completion is malformed.
    """
    answer = read_answer(body)
    if not answer.choices:
        raise TranslationError("The engine's answer contains no choice.")
    choice, content = answer.choices[0], list[dict[str, Any]]()
    message = choice.message
    if message.thought:
        content.append(
            {"type": "thinking", "thinking": to_text([message.thought]), "signature": ""}
        )
    if text := message.content or message.refusal:
        content.append({"type": "text", "text": to_text([text])})
    content += [_tool_use(call, _arguments(call)) for call in message.tool_calls or ()]
    reason, sequence = _stop(choice, has_tools=bool(message.tool_calls))
    return encode_in_pieces(
        _message(answer.id, model, content, answer.usage or ChatUsage())
        | {"stop_reason": reason, "stop_sequence": sequence}
    )


def from_error(status: int, body: bytes) -> bytes:
    """Translate the body of an error response from OpenAI's to Anthropic's format."""
    try:
        detail = read_error(read_answer(body).error)
    except TranslationError:
        detail = ErrorDetail()
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": detail.message}})


def _message(
    chat_id: str, model: str, content: list[dict[str, Any]], usage: ChatUsage
) -> dict[str, Any]:
    return {
        "id": f"msg_{chat_id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _usage(usage: ChatUsage) -> dict[str, int]:
    # Return the token counts in Anthropic's format.
    #
    # Anthropic's prompt counts add up to the whole prompt: `input_tokens` excludes cached tokens.
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(choice: ChatChoice, *, has_tools: bool) -> tuple[str, str | None]:
    # Return the stop reason and the stop sequence of a message.
    #
    # Engines may end a forced tool call with `stop`, which becomes `tool_use` here.
    reason = choice.finish_reason or "stop"
    if reason == "stop" and has_tools:
        return "tool_use", None
    if reason == "stop" and choice.stop_string is not None:
        return "stop_sequence", choice.stop_string
    return _STOP_REASONS.get(reason, "end_turn"), None


def _tool_use(call: ChatToolCall, arguments: object) -> dict[str, Any]:
    name = call.function.name or ""
    return {"type": "tool_use", "id": call.id or "", "name": name, "input": arguments}


def _arguments(call: ChatToolCall) -> object:
    # Return the arguments of a tool call as an object: the model's own JSON, if it is valid.
    #
    # Invalid arguments are wrapped in an object as text, so that nothing is lost.
    text = call.function.arguments or "{}"
    try:
        _decode_object(text)
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": to_text([text])}
    return msgspec.Raw(text)


class MessagesStream(StreamTranslator):
    """Translates the chunks of a chat stream to the events of an Anthropic message stream.

    Some clients read the number of prompt tokens only from the first event, but most engines report
    it at the end. Then the first event has the expected number.
    """

    __slots__ = ("_expected", "_index", "_kind", "_model")

    def __init__(self, model: str, prompt_tokens: int = 0) -> None:
        """Create a translator for one stream; `prompt_tokens` is the expected prompt length."""
        super().__init__()
        self._model = model
        self._expected = ChatUsage(prompt_tokens)
        self._index = -1
        self._kind: str | tuple[str, int] | None = None

    def _start(self, answer: ChatAnswer) -> Iterator[bytes]:
        usage = self.usage if self.usage.prompt_tokens else self._expected
        message = _message(answer.id, self._model, [], usage)
        yield from format_event("message_start", {"type": "message_start", "message": message})

    def _delta(self, choice: ChatChoice) -> Iterator[bytes]:
        delta = choice.delta
        if delta.thought:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield from self._piece({"type": "thinking_delta", "thinking": to_text([delta.thought])})
        if text := delta.content or delta.refusal:
            yield from self._open("text", {"type": "text", "text": ""})
            yield from self._piece({"type": "text_delta", "text": to_text([text])})
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def _call(self, call: ChatToolCall) -> Iterator[bytes]:
        kind = ("tool_use", call.index)
        if self._kind != kind:
            self.note_call(call.index)
            yield from self._open(kind, _tool_use(call, {}))
        if call.function.arguments:
            arguments = to_text([call.function.arguments])
            piece = {"type": "input_json_delta", "partial_json": arguments}
            yield from self._piece(piece)

    def _open(self, kind: str | tuple[str, int], block: dict[str, Any]) -> Iterator[bytes]:
        # Start a content block, and end the current one if it is of another kind.
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield from format_event("content_block_start", start)

    def _close(self) -> Iterator[bytes]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            yield from self._piece({"type": "signature_delta", "signature": ""})
        self._kind = None
        stop = {"type": "content_block_stop", "index": self._index}
        yield from format_event("content_block_stop", stop)

    def _piece(self, delta: dict[str, Any]) -> Iterator[bytes]:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return format_event("content_block_delta", event)

    def _end(self) -> Iterator[bytes]:
        yield from self._close()
        reason, sequence = _stop(self.ending, has_tools=bool(self.seen_calls))
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        event = {"type": "message_delta", "delta": delta, "usage": _usage(self.usage)}
        yield from format_event("message_delta", event)
        yield from format_event("message_stop", {"type": "message_stop"})

    def _fail(self, detail: ErrorDetail) -> Iterator[bytes]:
        kind = _TYPES_IN_STREAM.get(detail.type or "", "api_error")
        error = {"type": "error", "error": {"type": kind, "message": detail.message}}
        yield from format_event("error", error)
