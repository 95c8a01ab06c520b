"""The places where SGLang's and TensorRT-LLM's HTTP APIs differ from vLLM's: error bodies and some
fields.

vLLM's own format is in mockgpu/http/openai_format.py. Source: engines.md A (errors, streams).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from mockgpu.handoff.trtllm import CHAT_FIELDS, COMPLETION_FIELDS
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody


class EngineFormat(StrEnum):
    """The kinds of engines whose HTTP API a mock group can imitate."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


def engine_of(dialect: str | None) -> EngineFormat:
    """Return the engine that uses this protocol of prefill/decode handoff; vLLM for None."""
    return EngineFormat(dialect) if dialect in ("sglang", "trtllm") else EngineFormat.VLLM


def error_body(error: ApiError, engine: EngineFormat, streaming: bool = False) -> bytes:
    """Return the JSON body of an error in the format of the imitated engine.

    The fields are nested in the member `error` by vLLM always, and by SGLang in streams; otherwise
    they are at the top level.
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
    """Return the request with SGLang's `extra_key` merged into its cache salt.

    Requests then share cached blocks only if both `cache_salt` and `extra_key` are equal.
    """
    salt = (parsed.body.cache_salt or "") + (parsed.body.extra_key or "")
    return msgspec.structs.replace(
        parsed, body=msgspec.structs.replace(parsed.body, cache_salt=salt or None)
    )


def request_schemas(engine: EngineFormat) -> dict[str, Any]:
    """Return the two request schemas for an engine's OpenAPI page, with property names only."""
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
