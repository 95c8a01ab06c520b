"""Translates a stream of chat chunks to the events of a Responses stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.protocol.translate.chat_types import (
    ChatAnswer,
    ChatChoice,
    ChatToolCall,
    ErrorDetail,
    TranslationError,
)
from gateway.protocol.translate.custom_tools import custom_input, custom_names
from gateway.protocol.translate.json_pieces import Text, to_text
from gateway.protocol.translate.responses_answer import (
    call_item,
    custom_item,
    ended,
    function_names,
    last_status,
    message_item,
    reasoning_item,
    refusal_part,
    response_head,
    text_part,
    usage_of,
)
from gateway.protocol.translate.sse import format_event
from gateway.protocol.translate.translator import StreamTranslator

MAX_ANSWER_CHARS = 8 * 1024 * 1024
"""Maximum characters of one answer's text, which the last events repeat four times."""


class OpenItem(msgspec.Struct):
    """The output item that the engine is writing now. Its text arrives in pieces."""

    kind: str
    item_id: str
    call: ChatToolCall | None = None
    pieces: list[str] = []
    logprobs: list[msgspec.Raw] = []

    @property
    def text(self) -> Text:
        """Return the text that the current output item has so far."""
        return to_text(
            [custom_input("".join(self.pieces))] if self.kind == "custom" else self.pieces
        )


class ResponsesStream(StreamTranslator):
    """Translates the chunks of a chat stream to the events of a Responses stream.

    The events are numbered from 0.
    """

    __slots__ = (
        *("_custom", "_early", "_echoed", "_head", "_item", "_key", "_model", "_names"),
        *("_output", "_sequence", "_size"),
    )

    def __init__(self, model: str, echoed: Mapping[str, Any]) -> None:
        super().__init__()
        self._model = model
        self._echoed = echoed
        self._names = function_names(echoed)
        self._custom = custom_names(echoed["tools"])
        self._head: dict[str, Any] = {}
        self._item: OpenItem | None = None
        self._early: list[msgspec.Raw] = []  # log probabilities whose text has not come yet
        self._output: list[dict[str, Any]] = []
        self._key = ""
        self._sequence = self._size = 0

    def _start(self, answer: ChatAnswer) -> Iterator[bytes]:
        self._key = answer.id.removeprefix("chatcmpl-")
        self._head = response_head(self._key, self._model, answer.created, self._echoed)
        for name in ("created", "in_progress"):
            yield from self._emit(f"response.{name}", {"response": self._head})

    def _delta(self, choice: ChatChoice) -> Iterator[bytes]:
        delta = choice.delta
        if delta.thought:
            yield from self._open("reasoning")
            yield from self._piece("response.reasoning_text.delta", delta.thought)
        if delta.content:
            yield from self._open("text")
            yield from self._text(delta.content, choice.token_logprobs)
        elif choice.token_logprobs and not (delta.thought or delta.refusal or delta.tool_calls):
            # An engine holds text back, such as half a character, but not what it knows of tokens.
            self._early += choice.token_logprobs
            self._grow(sum(map(len, choice.token_logprobs)))
        if delta.refusal:
            yield from self._open("refusal")
            yield from self._piece("response.refusal.delta", delta.refusal)
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def _text(self, text: str, logprobs: tuple[msgspec.Raw, ...]) -> Iterator[bytes]:
        assert self._item is not None
        shown = [*self._early, *logprobs]
        self._early.clear()
        self._item.logprobs += shown
        self._grow(sum(map(len, logprobs)))
        return self._piece("response.output_text.delta", text, logprobs=shown)

    def _call(self, call: ChatToolCall) -> Iterator[bytes]:
        current = self._item.call if self._item is not None else None
        if current is None or current.index != call.index:
            self.note_call(call.index)
            yield from self._close()
            kind = "custom" if call.function.name in self._custom else "call"
            yield from self._open(kind, call)
        if call.function.arguments:
            yield from self._arguments(call.function.arguments)

    def _arguments(self, text: str) -> Iterator[bytes]:
        # The input of a custom tool is known only when its arguments, which are JSON, are complete.
        if self._item is not None and self._item.kind == "custom":
            self._keep(text)
            return iter(())
        return self._piece("response.function_call_arguments.delta", text)

    def _open(self, kind: str, call: ChatToolCall | None = None) -> Iterator[bytes]:
        # Start an output item, and end the current one if it is of another kind.
        if self._item is not None and self._item.kind == kind:
            return
        yield from self._close()
        prefix = {"reasoning": "rs", "call": "fc", "custom": "ctc"}.get(kind, "msg")
        self._item = OpenItem(kind, f"{prefix}_{self._key}_{len(self._output)}", call)
        event = {"output_index": len(self._output), "item": self._item_now("in_progress", None)}
        yield from self._emit("response.output_item.added", event)
        if call is None:
            yield from self._emit(
                "response.content_part.added", self._locate_part(part=self._part(""))
            )

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        # End the current item: yield the events that repeat its text, and the item itself.
        #
        # status  "completed", or "incomplete" if the answer is cut off within the item
        item = self._item
        if item is None:
            return
        if item.kind == "text":
            item.logprobs += self._early
            self._early.clear()
        text, position = item.text, {"item_id": item.item_id, "output_index": len(self._output)}
        if item.kind == "custom":
            name = "response.custom_tool_call_input"
            yield from self._emit(f"{name}.delta", {**position, "delta": text})
            yield from self._emit(f"{name}.done", {**position, "input": text})
        elif item.kind == "call":
            name = self._item_now(status, text)["name"]
            done = {**position, "name": name, "arguments": text}
            yield from self._emit("response.function_call_arguments.done", done)
        else:
            yield from self._emit(*self._text_done(item.kind, text))
            yield from self._emit(
                "response.content_part.done", self._locate_part(part=self._part(text))
            )
        finished = self._item_now(status, text)
        event = {"output_index": len(self._output), "item": finished}
        yield from self._emit("response.output_item.done", event)
        self._output.append(finished)
        self._item = None

    def _text_done(self, kind: str, text: Text) -> tuple[str, dict[str, Any]]:
        if kind == "reasoning":
            return "response.reasoning_text.done", self._locate_part(text=text)
        if kind == "refusal":
            return "response.refusal.done", self._locate_part(refusal=text)
        logprobs = [] if self._item is None else self._item.logprobs
        return "response.output_text.done", self._locate_part(text=text, logprobs=logprobs)

    def _item_now(self, status: str, text: Text | None) -> dict[str, Any]:
        # Return the current output item in the form that an event contains.
        #
        # status  "in_progress", "completed" or "incomplete"
        # text    the item's text so far; None when the item is announced
        item = self._item
        assert item is not None
        if item.kind == "reasoning":
            return reasoning_item(item.item_id, status, text)
        if item.kind == "custom" and item.call is not None:
            return custom_item(item.item_id, item.call, status, text or "")
        if item.call is not None:
            return call_item(item.item_id, item.call, status, self._names, text or "")
        part = None if text is None else self._part(text)
        return message_item(item.item_id, part, status)

    def _part(self, text: Text) -> dict[str, Any]:
        kind = self._item.kind if self._item is not None else "text"
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        if kind == "refusal":
            return refusal_part(text)
        return text_part(text, [] if self._item is None else self._item.logprobs)

    def _locate_part(self, **members: Any) -> dict[str, Any]:
        # Return `members` with those that locate the current content part: the item's id, the
        # output index and the content index.
        item_id = self._item.item_id if self._item is not None else ""
        position = {"item_id": item_id, "output_index": len(self._output), "content_index": 0}
        return position | members

    def _piece(self, name: str, text: str, **members: Any) -> Iterator[bytes]:
        item = self._keep(text)
        event = self._locate_part(delta=to_text([text]), **members)
        if item.kind == "call":
            del event["content_index"]
        return self._emit(name, event)

    def _keep(self, text: str) -> OpenItem:
        # Add text to the current item. Raises TranslationError if the answer gets too long.
        item = self._item
        assert item is not None
        self._grow(len(text))
        item.pieces.append(text)
        return item

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_ANSWER_CHARS:
            raise TranslationError(
                f"The engine's answer is longer than {MAX_ANSWER_CHARS} characters, the limit for "
                "translations."
            )

    def _emit(self, name: str, members: dict[str, Any]) -> Iterator[bytes]:
        event = {"type": name, "sequence_number": self._sequence, **members}
        self._sequence += 1
        return format_event(name, event)

    def _end(self) -> Iterator[bytes]:
        yield from self._close(last_status(self.ending.finish_reason))
        last = ended(self.ending.finish_reason, self._output) | {"usage": usage_of(self.usage)}
        yield from self._emit(f"response.{last['status']}", {"response": self._head | last})

    def _fail(self, detail: ErrorDetail) -> Iterator[bytes]:
        code = detail.code if isinstance(detail.code, str) else "server_error"
        error = {"code": code, "message": detail.message}
        state = {"status": "failed", "error": error, "output": self._output}
        yield from self._emit("response.failed", {"response": self._head | state})
