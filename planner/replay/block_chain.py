"""Converts a trace's block ids to the fleet's block size; simulates a cache without evictions."""

from __future__ import annotations

from collections.abc import Sequence

from planner.traces.recorded_request import TraceRequest, to_64_bits


def keys_of(request: TraceRequest, block_tokens: int) -> tuple[int, ...]:
    """Return ids of a prompt's complete blocks of `block_tokens` tokens, from a trace's block ids.

    Two prompts have the same id where they are equal up to the end of that block. The trace may
    have blocks of another size. A new block then gets the id of the recorded block in which it
    ends. If several new blocks end in one recorded block, their ids also contain their position in
    it.
    """
    whole, size = request.input_tokens // block_tokens, request.block_tokens
    if size == block_tokens:
        return request.blocks[:whole]
    if block_tokens % size == 0:
        step = block_tokens // size
        return request.blocks[step - 1 : whole * step : step]
    pieces = -(-size // block_tokens)
    keys: list[int] = []
    if size % block_tokens == 0:
        blocks = request.blocks[: -(-whole // pieces)]
        for block in blocks:
            first = block * pieces
            keys += range(first, first + pieces)
        del keys[whole:]
        if max(blocks, default=0) * pieces + pieces > 1 << 64:
            return tuple([to_64_bits(key) if key >> 64 else key for key in keys])
        return tuple(keys)
    for index in range(whole):
        recorded = ((index + 1) * block_tokens - 1) // size
        if recorded >= len(request.blocks):
            break
        keys.append(
            to_64_bits(request.blocks[recorded] * pieces + index - recorded * size // block_tokens)
        )
    return tuple(keys)


class AnswerBlocks:
    """Creates ids for the KV blocks that answers fill. No prompt has these ids."""

    __slots__ = ("_block_tokens", "_next_id")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._next_id = -1  # ids of prompt blocks are not negative

    def append_to(self, keys: tuple[int, ...], request: TraceRequest) -> tuple[int, ...]:
        """Return the ids of a request's complete KV blocks, of its prompt and its answer.

        keys     the ids of the prompt's blocks
        request  the request in the trace

        Blocks that are not in `keys` get new ids.
        """
        filled = (request.input_tokens + request.output_tokens) // self._block_tokens
        first = self._next_id
        self._next_id -= max(0, filled - len(keys))
        return (*keys, *range(first, self._next_id, -1))


class UnlimitedCache:
    """A simulated cache that never evicts.

    It shows how many tokens of each prompt the best possible cache would have.
    """

    __slots__ = ("_block_tokens", "_known")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: set[int] = set()

    def hit(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are cached, and add the whole prompt to the cache.

        `keys` are the prompt's chained block ids (`keys_of`).
        """
        known, hits = self._known, 0
        limit = min(len(keys), (prompt_tokens - 1) // self._block_tokens)
        while hits < limit and keys[hits] in known:
            hits += 1
        known.update(keys[hits:])
        return hits * self._block_tokens
