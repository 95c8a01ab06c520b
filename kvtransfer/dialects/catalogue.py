"""Lists all dialects (protocols by which engines pass KV to each other) by name.

To add one, write a module for it and add a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtransfer.dialects.dialect import Dialect
from kvtransfer.dialects.mooncake import MOONCAKE
from kvtransfer.dialects.penstock import PENSTOCK
from kvtransfer.dialects.sglang import SGLANG
from kvtransfer.dialects.trtllm import CHAT, COMPLETIONS, TRTLLM
from kvtransfer.dialects.vllm_nixl import VLLM_NIXL
from kvtransfer.dialects.vllm_push import VLLM_PUSH

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (VLLM_NIXL, VLLM_PUSH, PENSTOCK, MOONCAKE, SGLANG, TRTLLM)
    }
)


def get_dialect(name: str) -> Dialect:
    """Return the dialect (handoff protocol) of this name. Raises KeyError for an unknown name."""
    return DIALECTS[name]


def known_members(engine: str, *, chat: bool) -> frozenset[str] | None:
    """Return the names of all JSON members that this kind of engine accepts in a request.

    The gateway removes others, because such an engine would refuse them. Returns None if the engine
    ignores unknown members.
    """
    if engine != TRTLLM.engine:
        return None
    return CHAT if chat else COMPLETIONS


def standalone_members(engine: str) -> Mapping[str, str | int]:
    """Return the JSON members that this kind of engine needs in a request that is not split.

    For example, SGLang answers 400 to a health probe without them.
    """
    return next(
        (
            dialect.standalone_members
            for dialect in DIALECTS.values()
            if dialect.engine == engine and dialect.standalone_members
        ),
        {},
    )
