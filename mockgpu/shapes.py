"""How each engine words its errors, and the few further ways in which SGLang and TensorRT-LLM differ from vLLM.

vLLM's own words are dialect.py's. Source: engines.md A (errors, streams).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from mockgpu.ask import ApiError, Ask, Body
from mockgpu.handoff.trtllm import CHAT_FIELDS, COMPLETION_FIELDS


class Engine(StrEnum):
    """Whose HTTP surface a group shows."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


def engine_of(dialect: str | None) -> Engine:
    """The engine that speaks a dialect of split requests; vLLM where there is none."""
    return Engine(dialect) if dialect in ("sglang", "trtllm") else Engine.VLLM


def error_body(error: ApiError, engine: Engine, streaming: bool = False) -> bytes:
    """An error's JSON: nested with vLLM, and in SGLang's streams; at the top level otherwise."""
    if engine is Engine.VLLM:
        return error.body()
    flat = {
        "object": "error",
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.status,
    }
    return msgspec.json.encode({"error": flat} if streaming and engine is Engine.SGLANG else flat)


def with_extra_key(ask: Ask) -> Ask:
    """As SGLang reads it: cached blocks are shared by requests with equal `cache_salt` and `extra_key` together."""
    salt = (ask.body.cache_salt or "") + (ask.body.extra_key or "")
    return msgspec.structs.replace(
        ask, body=msgspec.structs.replace(ask.body, cache_salt=salt or None)
    )


def request_schemas(engine: Engine) -> dict[str, Any]:
    """The two requests in an engine's OpenAPI page, by the names of their members alone."""
    own = frozenset(Body.__struct_fields__) - (set() if engine is Engine.SGLANG else {"extra_key"})
    chat, completion = (CHAT_FIELDS, COMPLETION_FIELDS) if engine is Engine.TRTLLM else (own, own)
    named = {"ChatCompletionRequest": chat, "CompletionRequest": completion}
    return {
        name: {"type": "object", "properties": {each: {} for each in sorted(of)}}
        for name, of in named.items()
    }
