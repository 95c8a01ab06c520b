"""Chained block ids as the fleet needs them: joined or cut to its block size, and what an endless cache would hold."""

from __future__ import annotations

from collections.abc import Sequence

from planner.traces.shape import TraceRequest, folded


def keys_of(one: TraceRequest, block_tokens: int) -> tuple[int, ...]:
    """The ids of the prompt's whole blocks of that size, `block_tokens` tokens each.

    Ids are chained, so a new block is named by the recorded block in which it ends: whoever shares that one shares all
    before it. Where several end in one recorded block they are told apart by their place in it.
    """
    whole, size = one.input_tokens // block_tokens, one.block_tokens
    if size == block_tokens:
        return one.blocks[:whole]
    if block_tokens % size == 0:
        step = block_tokens // size
        return one.blocks[step - 1 : whole * step : step]
    pieces, keys = -(-size // block_tokens), []
    for place in range(whole):
        recorded = ((place + 1) * block_tokens - 1) // size
        if recorded >= len(one.blocks):
            break
        keys.append(folded(one.blocks[recorded] * pieces + place - recorded * size // block_tokens))
    return tuple(keys)


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
