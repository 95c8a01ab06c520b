"""Translates requests to count the tokens of a prompt to vLLM's /tokenize, and its answers back.

Clients send such requests to /v1/messages/count_tokens and /v1/responses/input_tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.protocol.translate import messages_request, responses_request
from gateway.protocol.translate.chat_types import TranslationError
from gateway.protocol.translate.request_reader import encode, read_object, require

_RENDERED = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "mm_processor_kwargs"),
)


class _Tokenized(msgspec.Struct, frozen=True):
    count: int


_read = msgspec.json.Decoder(_Tokenized).decode


def messages_to_tokenize(body: bytes) -> bytes:
    """Translate the body of /v1/messages/count_tokens to a body for vLLM's /tokenize.

    Raises GatewayError (400) with the name of a member that cannot be translated.
    """
    members = read_object(body)
    require(members, "model", "messages")
    return _tokenize_body(messages_request.chat_members(members))


def messages_count(answer: bytes | bytearray) -> bytes:
    """Translate an engine's answer to /tokenize to the answer to a count_tokens request.

    Raises TranslationError if the answer is malformed.
    """
    return encode({"input_tokens": _read_count(answer)})


def responses_to_tokenize(body: bytes) -> bytes:
    """Translate the body of /v1/responses/input_tokens to a body for vLLM's /tokenize.

    Raises GatewayError (400) with the name of a member that cannot be translated.
    """
    return _tokenize_body(responses_request.chat_members(read_object(body)))


def responses_count(answer: bytes | bytearray) -> bytes:
    """Translate an engine's answer to /tokenize to the answer to an input_tokens request.

    Raises TranslationError if the answer is malformed.
    """
    return encode({"object": "response.input_tokens", "input_tokens": _read_count(answer)})


def _tokenize_body(chat: Mapping[str, Any]) -> bytes:
    # Return the body of a /tokenize request for the prompt of a chat completion request.
    return encode({name: chat[name] for name in _RENDERED if name in chat})


def _read_count(answer: bytes | bytearray) -> int:
    # Return the number of tokens in an engine's answer to /tokenize.
    try:
        return _read(answer).count
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TranslationError(
            f"The engine's answer to a token count is invalid: {error}."
        ) from None
