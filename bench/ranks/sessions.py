"""Draws agent sessions from a random seed. Contexts grow by the results of tools.

A seed first determines the parameters of the workload, such as the median length of a tool's
result. So different seeds are different workloads, and not only different arrivals.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from random import Random

import msgspec

from planner.text_generator import BLOCK_TOKENS
from planner.traces.recorded_request import PRIVATE, TraceRequest

MOST_TURNS = 60
MOST_TOKENS = 120_000


class Workload(msgspec.Struct, frozen=True):
    """The parameters of a random seed's sessions. Lengths are in tokens, times in seconds.

    Medians and sigmas are those of log-normal distributions.

    trunks         lengths of the system prompts with tool descriptions, one per kind of agent
    task_tokens    median length of the first message
    tool_tokens    median length of a tool's result, with a sigma of 1
    answer_tokens  mean length of an answer, with a sigma of 0.7
    turns          mean number of turns of a session
    think_s        median time between an answer and the next turn, with a sigma of 1
    skew           load of the busiest expert-parallel rank, divided by the mean load
    """

    trunks: tuple[int, ...]
    task_tokens: float
    tool_tokens: float
    answer_tokens: float
    turns: float
    think_s: float
    skew: float


def draw(seed: int) -> Workload:
    rng = Random(f"agents {seed}")
    return Workload(
        trunks=tuple(round(rng.uniform(6_000, 24_000)) for _ in range(rng.randint(1, 4))),
        task_tokens=_log_uniform(rng, 300, 6_000),
        tool_tokens=_log_uniform(rng, 300, 2_000),
        answer_tokens=_log_uniform(rng, 80, 400),
        turns=_log_uniform(rng, 6, 30),
        think_s=_log_uniform(rng, 1.5, 12),
        skew=rng.uniform(1.0, 1.5),
    )


def sessions(workload: Workload, seed: int, count: int) -> Iterator[TraceRequest]:
    """Yield the requests of `count` sessions, session by session.

    `think_s` of a request is the pause before it; the first request of a session has none.
    """
    rng = Random(f"sessions {seed}")
    private = PRIVATE
    for number in range(count):
        kind = rng.randrange(len(workload.trunks))
        trunk = workload.trunks[kind] // BLOCK_TOKENS
        blocks = tuple(range(kind << 10, (kind << 10) + trunk))
        tokens = trunk * BLOCK_TOKENS + round(_lognormal(rng, workload.task_tokens, 1.0))
        for turn in range(max(2, min(MOST_TURNS, round(rng.expovariate(1 / workload.turns))))):
            if tokens > MOST_TOKENS:
                break
            added = -(-tokens // BLOCK_TOKENS) - len(blocks)
            blocks += tuple(range(private, private + added))
            private += added
            mean = workload.answer_tokens
            answer = min(4_000, max(5, round(_lognormal(rng, mean * exp(-0.245), 0.7))))
            pause = _lognormal(rng, workload.think_s, 1.0) if turn else None
            yield TraceRequest(0.0, tokens, answer, blocks, session=f"s{number}", think_s=pause)
            # The last block was not full, so the next prompt has a different block in its place.
            blocks = blocks[: tokens // BLOCK_TOKENS]
            tokens += answer + round(_lognormal(rng, workload.tool_tokens, 1.0))


def _lognormal(rng: Random, median: float, sigma: float) -> float:
    return rng.lognormvariate(log(median), sigma)


def _log_uniform(rng: Random, low: float, high: float) -> float:
    return exp(rng.uniform(log(low), log(high)))
