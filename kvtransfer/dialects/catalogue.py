"""All dialects by name. A new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtransfer.dialects.contract import Dialect
from kvtransfer.dialects.mooncake import MOONCAKE
from kvtransfer.dialects.sglang import SGLANG
from kvtransfer.dialects.trtllm import CHAT, COMPLETIONS, TRTLLM
from kvtransfer.dialects.vllm_nixl import VLLM_NIXL
from kvtransfer.dialects.vllm_push import VLLM_PUSH

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {each.name: each for each in (VLLM_NIXL, VLLM_PUSH, MOONCAKE, SGLANG, TRTLLM)}
)


def named(name: str) -> Dialect:
    """The dialect a configuration names. Raises KeyError when there is none."""
    return DIALECTS[name]


def known_members(engine: str, *, chat: bool) -> frozenset[str] | None:
    """What a request to this engine may hold, where it refuses all that it does not know; None: it ignores the rest."""
    if engine != TRTLLM.engine:
        return None
    return CHAT if chat else COMPLETIONS


def by_itself(engine: str) -> Mapping[str, str | int]:
    """What a half of this engine wants of a request that it is to answer without any other half."""
    return next(
        (each.by_itself for each in DIALECTS.values() if each.engine == engine and each.by_itself),
        {},
    )
