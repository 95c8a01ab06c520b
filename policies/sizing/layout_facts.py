"""The numbers of heads, layers and experts of well-known models, which limit their layouts.

These few facts suffice to check a layout if only the model's name is known. Source: each model's
published config.json. Whole shapes are in model_shapes.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from policies.sizing.model_shapes import Llm


class ModelFacts(msgspec.Struct, frozen=True):
    """The properties of a model that limit its layouts.

    heads     number of attention heads
    kv_heads  number of KV heads; None: the model uses MLA
    layers    number of layers; None: unknown
    experts   number of routed experts per layer; 0: the model is dense
    """

    heads: int
    kv_heads: int | None
    layers: int | None = None
    experts: int = 0


def facts_of(model: Llm) -> ModelFacts:
    """Return the properties of a model that limit its layouts: heads, layers and experts."""
    kv_heads = None if model.mla else model.shardable_kv
    return ModelFacts(model.heads, kv_heads, model.layers, model.experts)


_SHAPES: Sequence[tuple[str, ModelFacts]] = (
    (r"demo-8b", ModelFacts(32, 8, 32)),
    (r"llama-?2-7b", ModelFacts(32, 32, 32)),
    (r"llama-?2-13b", ModelFacts(40, 40, 40)),
    (r"llama-?2-70b", ModelFacts(64, 8, 80)),
    (r"llama-3\.2-1b", ModelFacts(32, 8, 16)),
    (r"llama-3\.2-3b", ModelFacts(24, 8, 28)),
    (r"llama-3(\.1)?-8b", ModelFacts(32, 8, 32)),
    (r"llama-3(\.[13])?-70b", ModelFacts(64, 8, 80)),
    (r"llama-3\.1-405b", ModelFacts(128, 8, 126)),
    (r"llama-4-scout", ModelFacts(40, 8, 48, 16)),
    (r"llama-4-maverick", ModelFacts(40, 8, 48, 128)),
    (r"mistral-7b", ModelFacts(32, 8, 32)),
    (r"mixtral-8x7b", ModelFacts(32, 8, 32, 8)),
    (r"mixtral-8x22b", ModelFacts(48, 8, 56, 8)),
    (r"qwen2(\.5)?-7b", ModelFacts(28, 4, 28)),
    (r"qwen2\.5-14b", ModelFacts(40, 8, 48)),
    (r"qwen2\.5-32b", ModelFacts(40, 8, 64)),
    (r"qwen2(\.5)?-72b", ModelFacts(64, 8, 80)),
    (r"qwen3-8b", ModelFacts(32, 8, 36)),
    (r"qwen3-14b", ModelFacts(40, 8, 40)),
    (r"qwen3-32b", ModelFacts(64, 8, 64)),
    (r"qwen3-30b-a3b", ModelFacts(32, 4, 48, 128)),
    (r"qwen3-235b-a22b", ModelFacts(64, 4, 94, 128)),
    (r"phi-4", ModelFacts(40, 10, 40)),
    (r"gpt-oss-20b", ModelFacts(64, 8, 24, 32)),
    (r"gpt-oss-120b", ModelFacts(64, 8, 36, 128)),
    (r"deepseek-(v3|r1)", ModelFacts(128, None, 61, 256)),
    # The hybrid of seed 004, which states layers and experts; its heads are taken as 64 and 8.
    (r"hybrid-64", ModelFacts(64, 8, 60, 64)),
)
_PATTERNS = tuple(
    (re.compile(rf"(?:^|[^a-z0-9.])(?:meta-)?{pattern}(?![a-z0-9.])"), shape)
    for pattern, shape in _SHAPES
)


def facts_of_name(model: str) -> ModelFacts | None:
    """Return the properties of a model by its served or repository name; None: unknown.

    Distilled models are unknown, because the name of another model in their name says nothing about
    their shape.
    """
    name = model.lower()
    if "distill" in name:
        return None
    return next((shape for pattern, shape in _PATTERNS if pattern.search(name)), None)
