"""Generates llm-d's workload of business customers (B2B) as a trace.

There are 150 customers, each with a prompt of 6,000 tokens and five questions of 1,200 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from planner.text_generator import BLOCK_TOKENS
from planner.traces.recorded_request import TraceRequest

_OWN = 1 << 40


def b2b(
    rate: float,
    duration_s: float,
    seed: int = 0,
    prompts: int = 150,
    prompt_tokens: int = 6_000,
    question_tokens: int = 1_200,
    output_tokens: int = 1_000,
) -> Iterator[TraceRequest]:
    """Yield Poisson arrivals at `rate` per second, each a new question of a random customer.

    There are `prompts` customers, each with its own prompt.
    """
    rng = Random(f"b2b {seed}")
    shared = prompt_tokens // BLOCK_TOKENS
    total = prompt_tokens + question_tokens
    blocks = -(-total // BLOCK_TOKENS)
    at_s, number = rng.expovariate(rate), 0
    while at_s < duration_s:
        customer = rng.randrange(prompts)
        own = range(_OWN + number * blocks, _OWN + number * blocks + blocks - shared)
        yield TraceRequest(
            at_s, total, output_tokens, (*range(customer * shared, (customer + 1) * shared), *own)
        )
        number += 1
        at_s += rng.expovariate(rate)
