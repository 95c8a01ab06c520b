"""What one request would meet at an endpoint: expected TTFT and TPOT from the endpoint's live outlook.

Plain functions of EngineLoad. Step times and what is learnt about them are in step_time.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.engine_load import EngineLoad
    from policies.model import Candidate


def backlog_s(load: EngineLoad, now: float) -> float:
    """Seconds until the prompts booked so far are computed."""
    if now > load.due_at:  # what is late already was misjudged: expect it to take as long again
        return max(0.0, load.ready_at - load.due_at) + now - load.due_at
    return max(0.0, load.ready_at - now)


def room_s(load: EngineLoad, prompt_tokens: float) -> float:
    """Seconds until answers that end have left KV for a prompt of that length; none where it is free."""
    short = prompt_tokens - load.kv_free
    return short * load.kv_s if short > 0.0 else 0.0


def prefill_s(load: EngineLoad, uncached: float, cached: float) -> float:
    """Seconds that computing so many tokens behind so many cached ones takes at the present batch, waiting apart."""
    return uncached * load.token_s + uncached * (cached + 0.5 * uncached) * load.pair_s


def ttft_s(load: EngineLoad, uncached: float, cached: float, now: float) -> float:
    """Expected seconds from arrival at the endpoint to the first token: the queue or a wait for KV, then its own."""
    wait_s = backlog_s(load, now)
    if uncached + cached > load.kv_free:
        wait_s = max(wait_s, room_s(load, uncached + cached))
    return load.fixed_s + uncached * (load.token_s + (cached + 0.5 * uncached) * load.pair_s) + wait_s


def tpot_s(load: EngineLoad, context_tokens: float) -> float:
    """Expected seconds per output token of a newcomer with that much context."""
    return load.step_s + load.sequence_s + load.context_s * context_tokens


def ttfts(candidates: Sequence[Candidate], held: Sequence[int], prompt_tokens: int, now: float) -> list[float]:
    """`ttft_s` for every candidate, aligned; `held` is how many of the prompt's tokens each has cached."""
    return [
        ttft_s(candidate.load, prompt_tokens - cached, cached, now)
        for candidate, cached in zip(candidates, held, strict=True)
    ]
