"""The values that the scheduler works on: jobs, their states, step plans and outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from mockgpu.leg_params import DecodeLeg, OfferedKv, PrefillLeg
from mockgpu.roofline import StepWork

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_contents import Words


class JobState(Enum):
    """The state of a sequence. WAITING -> PREFILL -> DECODE -> DONE; preemption returns to WAITING.

    With KV from another group: WAITING -> FETCHING -> FETCHED -> PREFILL (of what is missing).
    """

    WAITING = auto()
    FETCHING = auto()
    FETCHED = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class Content(Protocol):
    """The content of a job's KV, and its text if the KV turns out wrong."""

    def states(self, start: int, end: int) -> Words:
        """Return the states of tokens [start, end) of prompt and answer
        (mockgpu/kv_contents.py).
        """
        ...

    def replace_text(self, taint: int) -> None:
        """Replace the text, because the prompt's KV is wrong. `taint` is a digest of the error."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to serve. Owned by the scheduler once added.

    keys           chained keys of the full blocks of prompt and output; short or empty: not
                   cacheable
    computed       tokens of the prompt (after preemption, also of the output) whose KV is
                   present or planned
    cached         prompt tokens found in the prefix cache at first admission; -1 before
    made           output tokens, current only while not decoding; see `Scheduler.count_output()`
    origin         while decoding: the scheduler's tick minus the tokens made
    leg            PrefillLeg: its KV goes to another group at its end; DecodeLeg: its KV comes
                   from another group; None: neither
    content        None in a group without real KV
    keeps_blocks   its blocks stay allocated at its end, until `Scheduler.release_kept()`
    offered        after its end: what the other group may learn of its KV
    tokens, salt   tokens of prompt and output, four bytes each, and the cache salt; set only in a
                   group that publishes KV events
    """

    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int] = ()
    state: JobState = JobState.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = -1
    made: int = 0
    origin: int = 0
    preemptions: int = 0
    leg: PrefillLeg | DecodeLeg | None = None
    content: Content | None = None
    keeps_blocks: bool = False
    offered: OfferedKv | None = None
    tokens: bytes = b""
    salt: str = ""

    @property
    def known_tokens(self) -> int:
        """Tokens that a prefill must compute: the prompt and, after preemption, the output."""
        return self.prompt_tokens + self.made


@dataclass(slots=True)
class PrefillChunk:
    """Part of a prompt computed in one step: tokens [start, start + tokens)."""

    job: Job
    start: int
    tokens: int
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """One step: its prefill chunks, and the number and total context of decoding sequences."""

    chunks: list[PrefillChunk]
    decode_seqs: int
    decode_context: int

    @property
    def work(self) -> StepWork:
        """The step's work for the roofline."""
        tokens, area = 0, 0.0
        for chunk in self.chunks:
            tokens += chunk.tokens
            area += chunk.tokens * (chunk.start + chunk.tokens / 2)
        return StepWork(tokens, area, self.decode_seqs, self.decode_context)


@dataclass(slots=True)
class StepOutcome:
    """The result of a step: jobs that made their first token, decoded tokens, and ended jobs."""

    first_token_jobs: list[Job]
    decoded: int
    ended: list[Job]


@dataclass(slots=True)
class Totals:
    """Counters since the start, with vLLM's meaning."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
