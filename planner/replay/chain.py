"""Chained block ids as the fleet needs them: joined or cut to its block size, and what an endless cache would hold."""

from __future__ import annotations

from collections.abc import Sequence

from planner.traces.shape import TraceRequest


def keys_of(one: TraceRequest, block_tokens: int) -> tuple[int, ...]:
    """The ids of the prompt's whole blocks of that size.

    Chained ids need no arithmetic: the last small block within a large one names it. Cut smaller, a block becomes
    several that nobody shares without sharing the block.
    """
    whole = one.input_tokens // block_tokens
    if one.block_tokens == block_tokens:
        return one.blocks[:whole]
    if block_tokens % one.block_tokens == 0:
        step = block_tokens // one.block_tokens
        return one.blocks[step - 1 : whole * step : step]
    pieces = -(-one.block_tokens // block_tokens)
    return tuple(each * pieces + piece for each in one.blocks for piece in range(pieces))[:whole]


class Ideal:
    """One cache in common that forgets nothing: how much of every prompt could have been had."""

    __slots__ = ("_block_tokens", "_known")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: set[int] = set()

    def hit(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Prompt tokens that were seen before; now they are."""
        known, found = self._known, 0
        limit = min(len(keys), (prompt_tokens - 1) // self._block_tokens)
        while found < limit and keys[found] in known:
            found += 1
        known.update(keys[found:])
        return found * self._block_tokens
