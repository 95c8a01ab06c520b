"""The data classes of chat completions, with the members that other APIs can express.

Other members are ignored. Only one choice is read, because a Messages or Responses request cannot
ask for more.
"""

from __future__ import annotations

import msgspec


class ChatFunction(msgspec.Struct, frozen=True):
    """A function call of the model, or a piece of one in a stream."""

    name: str | None = None
    arguments: str | None = None


class ChatToolCall(msgspec.Struct, frozen=True):
    """A tool call of the model; in a stream, its first piece has the id and the name."""

    id: str | None = None
    function: ChatFunction = ChatFunction()
    index: int = 0


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of the model, or the delta of one in a stream.

    Engines report reasoning in one of two members.
    """

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ChatToolCall, ...] | None = None

    @property
    def thought(self) -> str:
        """Return the reasoning text from either of the two members; "" if there is none."""
        return self.reasoning or self.reasoning_content or ""


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log probabilities of the tokens of a choice, or of a piece of it, as raw JSON."""

    content: tuple[msgspec.Raw, ...] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat completion: `message` in an answer, `delta` in a stream.

    stop_reason   the stop string or token that ended the choice, as vLLM reports it
    matched_stop  the same value, as SGLang reports it
    """

    message: ChatMessage = ChatMessage()
    delta: ChatMessage = ChatMessage()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    logprobs: ChatLogprobs | None = None

    @property
    def token_logprobs(self) -> tuple[msgspec.Raw, ...]:
        """Return the log probabilities of the tokens; they are empty if none were requested."""
        return (self.logprobs.content or ()) if self.logprobs is not None else ()

    @property
    def stop_string(self) -> str | None:
        """Return which of the request's stop strings ended the answer; None if none of them did."""
        for stop in (self.stop_reason, self.matched_stop):
            if isinstance(stop, str):
                return stop
        return None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct, frozen=True):
    """The token counts of a chat completion; counts that an engine does not report are 0."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Return how many prompt tokens were in the engine's cache."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    @property
    def reasoning_tokens(self) -> int:
        """Return how many tokens of the answer the model used for reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens or 0) if details is not None else 0


class ChatAnswer(msgspec.Struct, frozen=True):
    """An engine's chat completion, or one chunk of a streamed one."""

    id: str = ""
    created: int = 0
    choices: tuple[ChatChoice, ...] = ()
    usage: ChatUsage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def has_error(self) -> bool:
        """Return whether the engine reported an error in place of an answer."""
        return bytes(self.error) not in (b"", b"null")


class ErrorDetail(msgspec.Struct, frozen=True):
    """The error object of an error response or event, in OpenAI's format."""

    message: str = "The engine reported an error."
    type: str | None = None
    code: str | int | None = None


class TranslationError(Exception):
    """Raised if an engine's answer cannot be expressed in the client's API."""


_read_answer = msgspec.json.Decoder(ChatAnswer).decode
_read_error = msgspec.json.Decoder(ErrorDetail | str).decode


def read_answer(data: bytes | bytearray) -> ChatAnswer:
    """Decode a chat completion or a chunk of one. Raises TranslationError if it is malformed."""
    try:
        return _read_answer(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TranslationError(
            f"The engine's answer is not a valid chat completion: {error}."
        ) from None


def read_error(error: msgspec.Raw) -> ErrorDetail:
    """Return the error object in an engine's error response, given as JSON.

    If the error is a string, it becomes the message. For any other value, a default error is
    returned.
    """
    try:
        detail = _read_error(error)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ErrorDetail()
    return ErrorDetail(detail) if isinstance(detail, str) else detail
