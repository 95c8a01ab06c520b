"""The workloads of `penstock bench`: kinds of traffic as generators of random sessions.

Lengths follow published workloads, which each shape names. Equal seeds give equal sessions on every
machine. open_and_closed_loop.py decides when they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log, sqrt
from pathlib import Path
from random import Random

import msgspec

from planner.text_generator import text
from planner.traces import read_mooncake


class Turn(msgspec.Struct, frozen=True):
    """One user message of a session.

    content        the message
    output_tokens  maximum tokens of its answer
    think_s        seconds of pause after the answer
    """

    content: str
    output_tokens: int
    think_s: float = 0.0


class WorkloadSession(msgspec.Struct, frozen=True):
    """One conversation. Each turn is sent together with all earlier turns and their answers.

    id      number of the session
    turns   the user's messages
    system  the system prompt; None: there is none
    """

    id: int
    turns: tuple[Turn, ...]
    system: str | None = None


class WorkloadShape(msgspec.Struct, frozen=True):
    """A kind of traffic, with a generator of sessions.

    mean_turns  mean number of requests per session, to convert a request rate to a session rate
    """

    name: str
    about: str
    sessions: Callable[[int], Iterator[WorkloadSession]]
    mean_turns: float = 1.0


class Arrival(msgspec.Struct, frozen=True):
    """A session of a benchmark's workload, with the time at which it starts.

    due_s    seconds from the start of the benchmark
    session  the session
    """

    due_s: float
    session: WorkloadSession


def lognormal(rng: Random, median: float, mean: float, least: int, most: int) -> int:
    """Draw a length from a log-normal distribution with this median and mean.

    A result below `least` or above `most` is replaced by that limit.
    """
    sigma = sqrt(2 * log(mean / median))
    return round(min(max(exp(rng.gauss(log(median), sigma)), least), most))


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times, in seconds from the start, of a Poisson process.

    rate  mean number of arrivals per second
    seed  random seed; equal seeds give equal times
    """
    rng = Random(f"arrivals {seed}")
    due_s = 0.0
    while True:
        due_s += rng.expovariate(rate)
        yield due_s


def open_loop(shape: WorkloadShape, rate: float, seed: int) -> Iterator[Arrival]:
    """Yield the sessions of a workload at random start times (open loop).

    shape  the kind of traffic
    rate   requests per second, on average
    seed   random seed of the start times and of the sessions
    """
    for due_s, session in zip(
        poisson(rate / shape.mean_turns, seed), shape.sessions(seed), strict=False
    ):
        yield Arrival(due_s, session)


def replay(path: Path, limit: int | None, speed: float) -> Iterator[Arrival]:
    """Yield each request of a recorded Mooncake trace, at its recorded time, as a session.

    The session has a single message.

    path   the trace file
    limit  maximum number of requests; None: all
    speed  how many times as fast as recorded
    """
    for number, request in enumerate(read_mooncake(path, limit, speed)):
        yield Arrival(
            request.arrival_s,
            WorkloadSession(number, (Turn(request.prompt(), request.output_tokens),)),
        )


def _chat(seed: int) -> Iterator[WorkloadSession]:
    rng = Random(f"chat {seed}")
    system = text(200, "chat", seed, "system")
    number = 0
    while True:
        prompt = text(lognormal(rng, 1020, 1155, 16, 14_000), "chat", seed, number)
        yield WorkloadSession(number, (Turn(prompt, lognormal(rng, 129, 211, 4, 1000)),), system)
        number += 1


def _rag(seed: int) -> Iterator[WorkloadSession]:
    rng = Random(f"rag {seed}")
    documents = 40
    lengths = [lognormal(rng, 12_000, 14_000, 2_000, 60_000) for _ in range(documents)]
    popularity = [1 / (rank + 1) for rank in range(documents)]
    system = text(400, "rag", seed, "system")
    number = 0
    while True:
        (document,) = rng.choices(range(documents), popularity)
        question = text(lognormal(rng, 120, 180, 8, 2_000), "rag", seed, "question", number)
        content = f"{text(lengths[document], 'rag', seed, 'document', document)}\n\n{question}"
        yield WorkloadSession(number, (Turn(content, lognormal(rng, 200, 260, 8, 1_000)),), system)
        number += 1


AGENT_TURNS = 8


def _agent(seed: int) -> Iterator[WorkloadSession]:
    rng = Random(f"agent {seed}")
    system = text(6_000, "agent", seed, "system and tools")
    number = 0
    while True:
        turns = tuple(
            Turn(
                text(lognormal(rng, 700, 1_400, 16, 20_000), "agent", seed, number, turn),
                lognormal(rng, 217, 439, 8, 3_678),
                think_s=rng.expovariate(1.0),
            )
            for turn in range(rng.randint(1, 2 * AGENT_TURNS - 1))
        )
        yield WorkloadSession(number, turns, system)
        number += 1


def _shared_prefix(seed: int) -> Iterator[WorkloadSession]:
    rng = Random(f"shared-prefix {seed}")
    number = 0
    while True:
        trunk, branch = rng.randrange(10), rng.randrange(15)
        shared = text(2_000, "tree", seed, trunk) + text(4_000, "tree", seed, trunk, branch)
        question = text(1_200, "tree", seed, "question", number)
        yield WorkloadSession(
            number, (Turn(question, lognormal(rng, 900, 1_000, 100, 3_000)),), shared
        )
        number += 1


def shapes() -> dict[str, WorkloadShape]:
    known = (
        WorkloadShape(
            "chat",
            "Azure 2023 conversations: prompt 1,020 median, answer 129; short shared system prompt",
            _chat,
        ),
        WorkloadShape(
            "rag",
            "one of 40 documents of 12k tokens by popularity (1/rank), then a question; answer 200",
            _rag,
        ),
        WorkloadShape(
            "agent",
            "6k tokens of shared tools, then 1-15 turns that grow by 700 each; answer 217",
            _agent,
            AGENT_TURNS,
        ),
        WorkloadShape(
            "shared-prefix",
            "150 prompts of 6,000 tokens as a tree of 10 x 15, questions of 1,200; answer 1,000",
            _shared_prefix,
        ),
    )
    return {shape.name: shape for shape in known}
