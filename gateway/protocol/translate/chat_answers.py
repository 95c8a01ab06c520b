"""What an engine answers to a chat completion: the parts that other APIs can express.

Members that are not listed are ignored. One choice is read, since neither API can ask for more.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ChatFunction(msgspec.Struct, frozen=True):
    """A function call, or a piece of one in a stream."""

    name: str | None = None
    arguments: str | None = None


class ChatToolCall(msgspec.Struct, frozen=True):
    """A tool call; in a stream its first piece has id and name."""

    id: str | None = None
    function: ChatFunction = ChatFunction()
    index: int = 0


class ChatMessage(msgspec.Struct, frozen=True):
    """A message, or the delta of one. Engines name the reasoning in two ways."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ChatToolCall, ...] | None = None

    @property
    def thought(self) -> str:
        """The reasoning, under either name."""
        return self.reasoning or self.reasoning_content or ""


class ChatChoice(msgspec.Struct, frozen=True):
    """A choice; `message` in an answer, `delta` in a stream.

    stop_reason, matched_stop  the stop string or token that ended it: vLLM's name, and SGLang's
    """

    message: ChatMessage = ChatMessage()
    delta: ChatMessage = ChatMessage()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string of the request that ended the answer; None if none did."""
        for stop in (self.stop_reason, self.matched_stop):
            if isinstance(stop, str):
                return stop
        return None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct, frozen=True):
    """Token counts; those that an engine does not report are 0."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """The part of the prompt that was cached."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    @property
    def reasoning_tokens(self) -> int:
        """The part of the answer that is reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens or 0) if details is not None else 0


class ChatAnswer(msgspec.Struct, frozen=True):
    """A chat completion, or one chunk of its stream."""

    id: str = ""
    created: int = 0
    choices: tuple[ChatChoice, ...] = ()
    usage: ChatUsage | None = None
    error: Any = None


class ErrorDetail(msgspec.Struct, frozen=True):
    """The error object of an error response or event, in OpenAI's shape."""

    message: str = "The engine reported an error."
    type: str | None = None
    code: str | int | None = None


class TranslationError(Exception):
    """Raised when an engine's answer cannot be expressed in the client's API."""


_read_answer = msgspec.json.Decoder(ChatAnswer).decode


def read_answer(data: bytes) -> ChatAnswer:
    """Decode a chat completion or a chunk. Raises TranslationError."""
    try:
        return _read_answer(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TranslationError(f"The engine's answer cannot be read: {error}.") from None


def read_error(error: object) -> ErrorDetail:
    """Return an error object; a bare string is its message, and anything odd a default one."""
    if isinstance(error, str):
        return ErrorDetail(error)
    try:
        return msgspec.convert(error, ErrorDetail)
    except msgspec.ValidationError:
        return ErrorDetail()
