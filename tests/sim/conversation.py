"""Reads recorded conversations of a Mooncake trace, and computes which share could be cached."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from planner.replay.block_chain import keys_of
from planner.traces import TraceRequest, read_mooncake

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_1500.jsonl.gz"
BLOCK_TOKENS = 512


def conversation(limit: int | None = None) -> list[TraceRequest]:
    return list(read_mooncake(TRACE, limit))


def shared_cache_hit_ratio(requests: Iterable[TraceRequest], capacity_tokens: int) -> float:
    # Return the hit ratio of a single LRU cache that sees every request.
    #
    # It has room for `capacity_tokens` tokens.
    cache: dict[int, None] = {}
    hits = total = 0
    for request in requests:
        keys = keys_of(request, BLOCK_TOKENS)
        known = 0
        while (
            known < min(len(keys), (request.input_tokens - 1) // BLOCK_TOKENS)
            and keys[known] in cache
        ):
            known += 1
        hits += known * BLOCK_TOKENS
        total += request.input_tokens
        for key in reversed(keys):
            cache.pop(key, None)
            cache[key] = None
        while len(cache) * BLOCK_TOKENS > capacity_tokens:
            del cache[next(iter(cache))]
    return hits / total
