"""How the HTTP APIs of SGLang and TensorRT-LLM differ from vLLM's: errors and some fields.

vLLM's own format is in mockgpu/http/openai_format.py. Sources: SGLang 0.5.23, tensorrt_llm/serve.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from mockgpu.handoff.trtllm import CHAT_FIELDS, COMPLETION_FIELDS
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody


class EngineFormat(StrEnum):
    """The kinds of engines whose HTTP API a mock engine can imitate."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


def engine_of(dialect: str | None) -> EngineFormat:
    """Return which engine to imitate for split requests with the protocol `dialect`; None: vLLM.

    A dialect is an engine's protocol for passing KV from a prefill to a decode engine.
    """
    return EngineFormat(dialect) if dialect in ("sglang", "trtllm") else EngineFormat.VLLM


def error_body(error: ApiError, engine: EngineFormat, streaming: bool = False) -> bytes:
    """Return the JSON body of an error in the format of the imitated engine.

    vLLM always nests the fields in an object `error`, and SGLang does so in streams. Otherwise the
    fields are at the top level.
    """
    if engine is EngineFormat.VLLM:
        return error.body()
    flat = {
        "object": "error",
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.status,
    }
    return msgspec.json.encode(
        {"error": flat} if streaming and engine is EngineFormat.SGLANG else flat
    )


def with_extra_key(parsed: ParsedRequest) -> ParsedRequest:
    """Return the request with SGLang's member `extra_key` added to its cache salt.

    Two requests then share cached blocks only if both their `cache_salt` and `extra_key` are equal.
    """
    salt = (parsed.body.cache_salt or "") + (parsed.body.extra_key or "")
    return msgspec.structs.replace(
        parsed, body=msgspec.structs.replace(parsed.body, cache_salt=salt or None)
    )


def request_schemas(engine: EngineFormat) -> dict[str, Any]:
    """Return the request schemas of chats and completions for an engine's OpenAPI page.

    The schemas have only the names of properties.
    """
    own = frozenset(RequestBody.__struct_fields__) - (
        set() if engine is EngineFormat.SGLANG else {"extra_key"}
    )
    chat, completion = (
        (CHAT_FIELDS, COMPLETION_FIELDS) if engine is EngineFormat.TRTLLM else (own, own)
    )
    members_by_schema = {"ChatCompletionRequest": chat, "CompletionRequest": completion}
    return {
        name: {"type": "object", "properties": {member: {} for member in sorted(members)}}
        for name, members in members_by_schema.items()
    }
