"""Short ways to make candidates and questions in tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from policies.model import Ask, Candidate, Endpoint, EndpointLoad, Request


def candidate(slot: int, cap: int = 1000, **load: object) -> Candidate:
    """Endpoint `tp<slot>`; keywords set its live numbers."""
    numbers = EndpointLoad(slot)
    for name, value in load.items():
        setattr(numbers, name, value)
    return Candidate(
        Endpoint(f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "pool", "model", max_concurrency=cap), numbers
    )


def ask(
    prompt_tokens: int = 1000,
    output_tokens: int = 100,
    cached: Sequence[int] = (),
    tried: Sequence[str] = (),
    now: float = 100.0,
    seed: int = 1,
) -> Ask:
    request = Request("id", "model", "tenant", prompt_tokens, output_tokens)
    return Ask(request, now, Random(seed), cached, frozenset(tried))
