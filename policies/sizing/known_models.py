"""Attention heads of well-known models by name, to determine which TP sizes an engine accepts.

Source: `num_attention_heads` and `num_key_value_heads` in each model's published config.json. Sizes
and speeds are in policies/engine/step_time.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec


class AttentionShape(msgspec.Struct, frozen=True):
    """Query heads and key-value heads of an attention layer. `kv_heads` is None for MLA."""

    heads: int
    kv_heads: int | None


_SHAPES: Sequence[tuple[str, AttentionShape]] = (
    (r"demo-8b", AttentionShape(32, 8)),
    (r"llama-?2-7b", AttentionShape(32, 32)),
    (r"llama-?2-13b", AttentionShape(40, 40)),
    (r"llama-?2-70b", AttentionShape(64, 8)),
    (r"llama-3\.2-1b", AttentionShape(32, 8)),
    (r"llama-3\.2-3b", AttentionShape(24, 8)),
    (r"llama-3(\.1)?-8b", AttentionShape(32, 8)),
    (r"llama-3(\.[13])?-70b", AttentionShape(64, 8)),
    (r"llama-3\.1-405b", AttentionShape(128, 8)),
    (r"llama-4-(scout|maverick)", AttentionShape(40, 8)),
    (r"mistral-7b", AttentionShape(32, 8)),
    (r"mixtral-8x7b", AttentionShape(32, 8)),
    (r"mixtral-8x22b", AttentionShape(48, 8)),
    (r"qwen2(\.5)?-7b", AttentionShape(28, 4)),
    (r"qwen2\.5-14b", AttentionShape(40, 8)),
    (r"qwen2\.5-32b", AttentionShape(40, 8)),
    (r"qwen2(\.5)?-72b", AttentionShape(64, 8)),
    (r"qwen3-8b", AttentionShape(32, 8)),
    (r"qwen3-14b", AttentionShape(40, 8)),
    (r"qwen3-32b", AttentionShape(64, 8)),
    (r"qwen3-30b-a3b", AttentionShape(32, 4)),
    (r"qwen3-235b-a22b", AttentionShape(64, 4)),
    (r"phi-4", AttentionShape(40, 10)),
    (r"gpt-oss-(20b|120b)", AttentionShape(64, 8)),
    (r"deepseek-(v3|r1)", AttentionShape(128, None)),
)
_PATTERNS = tuple(
    (re.compile(rf"(?:^|[^a-z0-9.])(?:meta-)?{pattern}(?![a-z0-9.])"), shape)
    for pattern, shape in _SHAPES
)


def attention_shape(model: str) -> AttentionShape | None:
    """Return the attention shape of a model by its served or repository name; None if unknown.

    Distilled models are unknown: their shape differs from that of the model in their name.
    """
    name = model.lower()
    if "distill" in name:
        return None
    return next((shape for pattern, shape in _PATTERNS if pattern.search(name)), None)


def tp_problem(shape: AttentionShape, tp: int) -> str | None:
    """Return why an engine with this TP size does not start; None if it does.

    vLLM's rules: TP divides the query heads, and KV heads are divided evenly or replicated evenly.
    """
    if shape.heads % tp:
        return f"{shape.heads} attention heads cannot be divided by tp {tp}"
    kv_heads = shape.kv_heads
    if kv_heads is not None and kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads can be neither divided by tp {tp} nor replicated over it"
    return None
