"""The values that the scheduler works on: jobs, their states, step plans and step outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from mockgpu.split_legs import DecodeLeg, OfferedKv, PrefillLeg
from mockgpu.timing.roofline import StepWork

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_contents import Words


class JobState(Enum):
    """The state of a job: WAITING -> PREFILL -> DECODE -> DONE. Preemption returns it to WAITING.

    A job with KV from another engine or from the host's store: WAITING -> FETCHING -> FETCHED ->
    PREFILL (of the tokens that are missing) -> DECODE -> DONE.
    """

    WAITING = auto()
    FETCHING = auto()
    FETCHED = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class Content(Protocol):
    """The content of a job's KV, and the answer text that depends on it."""

    def states(self, start: int, end: int) -> Words:
        """Return the KV words, one per token, of tokens `start` to `end` - 1 of prompt and answer.

        mockgpu/kv_contents.py defines the words.
        """
        ...

    def replace_text(self, taint: int) -> None:
        """Replace the answer, because the KV of its prompt is wrong; `taint` is the error's
        digest.
        """
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One sequence (prompt and answer) to compute. The scheduler owns it once it is added.

    keys             keys of the full blocks of prompt and output; blocks without a key are not
                     cached
    computed         number of its tokens (of the prompt; after a preemption, also of the output)
                     whose KV is present or planned
    cached           prompt tokens found in the prefix cache when first admitted; -1 before that
    generated_count  output tokens so far, current only while not decoding; see
                     `Scheduler.count_output()`
    origin           while decoding: the scheduler's tick (step counter) minus the output tokens
    leg              its half of a split request. PrefillLeg: another engine fetches its KV at its
                     end; DecodeLeg: its KV comes from another engine; None: it is not split
    content          content of its KV; None in an engine that stores no KV bytes
    keeps_blocks     whether its blocks stay allocated at its end, until `Scheduler.release_kept()`
    offered          set at its end: the description of its KV for the other engine
    tokens           tokens of prompt and output, four bytes each; only if the engine publishes KV
                     events or uses a store of KV
    salt             cache salt, under the same condition
    restores         whether the beginning of its prompt is looked up in the store of KV
    """

    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int] = ()
    state: JobState = JobState.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = -1
    generated_count: int = 0
    origin: int = 0
    preemptions: int = 0
    leg: PrefillLeg | DecodeLeg | None = None
    content: Content | None = None
    keeps_blocks: bool = False
    offered: OfferedKv | None = None
    tokens: bytes = b""
    salt: str = ""
    restores: bool = False

    @property
    def known_tokens(self) -> int:
        """Return the number of tokens that a prefill must compute: the prompt and, after
        preemption, the output.
        """
        return self.prompt_tokens + self.generated_count


@dataclass(slots=True)
class PrefillChunk:
    """The part of a prompt that is computed in one step: tokens [start, start + tokens)."""

    job: Job
    start: int
    tokens: int
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """The work of one engine step.

    chunks          the parts of prompts that are computed
    decode_seqs     number of jobs that decode
    decode_context  sum of their contexts, in tokens
    """

    chunks: list[PrefillChunk]
    decode_seqs: int
    decode_context: int

    @property
    def work(self) -> StepWork:
        """Return the amount of work in this step, for the step-time model (roofline)."""
        tokens, area = 0, 0.0
        for chunk in self.chunks:
            tokens += chunk.tokens
            area += chunk.tokens * (chunk.start + chunk.tokens / 2)
        return StepWork(tokens, area, self.decode_seqs, self.decode_context)


@dataclass(slots=True)
class StepOutcome:
    """The result of one engine step.

    first_token_jobs  jobs that got their first output token
    decoded           number of output tokens of decoding jobs
    ended             jobs that have ended
    """

    first_token_jobs: list[Job]
    decoded: int
    ended: list[Job]


@dataclass(slots=True)
class Totals:
    """Counters of an engine since its start, with the meanings of vLLM's metrics."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
