"""What the scheduler works on: jobs, their states, a step's plan and its outcome. Values and counters, no decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from mockgpu.handoff.legs import Give, Offered, Take
from mockgpu.roofline import Work

if TYPE_CHECKING:  # groups without real KV start without numpy and without kvtransfer's agents
    from mockgpu.kv import Words


class State(Enum):
    """Where a sequence stands. WAITING -> PREFILL -> DECODE -> DONE; preemption leads back to WAITING.

    One whose KV comes from another group: WAITING -> FETCHING -> FETCHED -> PREFILL (of what is still missing).
    """

    WAITING = auto()
    FETCHING = auto()
    FETCHED = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class Content(Protocol):
    """What a job's KV must hold, and what becomes of its words when it does not."""

    def states(self, start: int, end: int) -> Words:
        """The states of the tokens [start, end) of prompt and answer (kv.py)."""
        ...

    def spoil(self, taint: int) -> None:
        """The KV of the prompt is not what it should be, and this is the digest of how: other words follow."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to serve: so many prompt tokens in, so many tokens out. Owned by the scheduler once added.

    keys      chained keys of the full blocks of prompt and output, in order; short or empty = not cacheable
    computed  prompt (after preemption: prompt and output) tokens whose KV is there or planned
    cached    prompt tokens found in the prefix cache at first admission; -1 before it
    made      output tokens made, up to date while not decoding; ask `Scheduler.made()`
    origin    while decoding: the scheduler's tick less the tokens made, so that the tick alone tells how many they are
    leg       Give: its KV is for another group when it ends; Take: its KV comes from another; None: all is done here
    content   None in a group that holds no real KV
    keep      its blocks stay its own when it ends, until `Scheduler.let_go()`: another group will read them
    offered   what the other group may be told of them, once it has ended
    """

    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int] = ()
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = -1
    made: int = 0
    origin: int = 0
    preemptions: int = 0
    leg: Give | Take | None = None
    content: Content | None = None
    keep: bool = False
    offered: Offered | None = None

    @property
    def known_tokens(self) -> int:
        """Tokens whose KV a prefill must compute: the prompt and, after preemption, what was already generated."""
        return self.prompt_tokens + self.made


@dataclass(slots=True)
class Chunk:
    """Part of a prompt computed in one step: tokens [start, start + tokens)."""

    job: Job
    start: int
    tokens: int
    last: bool


@dataclass(slots=True)
class Plan:
    """One step: its prefill chunks, and how many sequences decode over how much context."""

    chunks: list[Chunk]
    decode_seqs: int
    decode_context: int

    @property
    def work(self) -> Work:
        """The step as the roofline reads it."""
        tokens, area = 0, 0.0
        for chunk in self.chunks:
            tokens += chunk.tokens
            area += chunk.tokens * (chunk.start + chunk.tokens / 2)
        return Work(tokens, area, self.decode_seqs, self.decode_context)


@dataclass(slots=True)
class Outcome:
    """What a step brought. Every job in `began` and `decoded` gained one token; `ended` are those that are now done."""

    began: list[Job]
    decoded: int
    ended: list[Job]


@dataclass(slots=True)
class Totals:
    """Counters since the start, in vLLM's meaning."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
