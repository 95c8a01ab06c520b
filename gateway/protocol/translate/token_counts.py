"""Counts the tokens of a request by vLLM's /tokenize: its body, and the count in its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.protocol.translate.chat_types import TranslationError
from gateway.protocol.translate.request_reader import encode

_RENDERED = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "mm_processor_kwargs"),
)


class _Tokenized(msgspec.Struct, frozen=True):
    count: int


_read = msgspec.json.Decoder(_Tokenized).decode


def tokenize_body(chat: Mapping[str, Any]) -> bytes:
    """Return the body of a /tokenize request for the prompt of a chat completion request."""
    return encode({name: chat[name] for name in _RENDERED if name in chat})


def read_count(answer: bytes | bytearray) -> int:
    """Return the number of tokens in an engine's answer to /tokenize.

    Raises TranslationError if the answer is malformed.
    """
    try:
        return _read(answer).count
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TranslationError(
            f"The engine's answer to a token count is invalid: {error}."
        ) from None
