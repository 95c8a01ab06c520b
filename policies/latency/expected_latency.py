"""Computes a request's expected TTFT and TPOT at an endpoint from the forecast of its load.

TTFT is the time to the first token, TPOT the time per further token. All are plain functions of
EngineLoad. step_time.py learns the step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.routing_types import Candidate


def backlog_s(load: EngineLoad, now: float) -> float:
    """Return the seconds until the endpoint has computed all prompts that were sent to it."""
    if (
        now > load.next_first_token_at
    ):  # A late first token was mispredicted: expect it to take as long again.
        return (
            max(0.0, load.prefill_done_at - load.next_first_token_at)
            + now
            - load.next_first_token_at
        )
    return max(0.0, load.prefill_done_at - now)


def is_first_token_late(load: EngineLoad, now: float) -> bool:
    """Return whether the next first token of an endpoint is overdue, compared with its forecast.

    If so, its backlog (`backlog_s`) is assumed to grow with time instead of shrinking.
    """
    return now > load.next_first_token_at


def room_s(load: EngineLoad, prompt_tokens: float) -> float:
    """Return how many seconds a prompt must wait until the endpoint has free KV memory for it.

    Memory becomes free as requests end. Returns 0 if enough is free already.
    """
    missing = prompt_tokens - load.free_kv_tokens
    return missing * load.s_per_freed_kv_token if missing > 0.0 else 0.0


def prefill_s(load: EngineLoad, uncached: float, cached: float) -> float:
    """Return the seconds that the endpoint needs to compute part of a prompt.

    uncached  number of prompt tokens to compute
    cached    number of prompt tokens before them, which attention reads too
    """
    return (
        uncached * load.prefill_s_per_token
        + uncached * (cached + 0.5 * uncached) * load.attention_s_per_pair
    )


def ttft_s(load: EngineLoad, uncached: float, cached: float, now: float) -> float:
    """Return the expected seconds from arrival at the endpoint to the first token (TTFT).

    uncached  prompt tokens to compute
    cached    prompt tokens before them that are cached

    The result is the prefill of the request, plus the wait for the queue or for KV, whichever is
    longer.
    """
    wait_s = backlog_s(load, now)
    if uncached + cached > load.free_kv_tokens:
        wait_s = max(wait_s, room_s(load, uncached + cached))
    return (
        load.fixed_ttft_s
        + uncached
        * (load.prefill_s_per_token + (cached + 0.5 * uncached) * load.attention_s_per_pair)
        + wait_s
    )


def tpot_s(load: EngineLoad, context_tokens: float) -> float:
    """Return the expected seconds per output token of a new request.

    `context_tokens` is the number of tokens of its context.
    """
    return (
        load.decode_s_per_token
        + load.decode_s_per_sequence
        + load.decode_s_per_context_token * context_tokens
    )


def ttfts(
    candidates: Sequence[Candidate], held: Sequence[int], prompt_tokens: int, now: float
) -> list[float]:
    """Return the expected seconds to a request's first token at each candidate, in order.

    held  number of prompt tokens that each candidate has cached, in the same order
    """
    return [
        ttft_s(candidate.load, prompt_tokens - cached, cached, now)
        for candidate, cached in zip(candidates, held, strict=True)
    ]
