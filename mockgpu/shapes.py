"""How each engine words its errors, and the few further ways in which SGLang and TensorRT-LLM differ from vLLM.

vLLM's own words are dialect.py's. Source: engines.md A (errors, streams).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from mockgpu.ask import ApiError


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
