"""The data of the scheduler: jobs, their states, the plan of a step, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from mockgpu.split_legs import DecodeLeg, OfferedKv, PrefillLeg
from mockgpu.timing.roofline import StepWork

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_bytes import Words


class JobState(Enum):
    """The state of a job.

        WAITING -> PREFILL -> DECODE -> DONE
        WAITING -> FETCHING -> FETCHED -> PREFILL -> DECODE -> DONE

    The second line is a job whose KV comes from another engine or from the host's store. It
    prefills only the missing tokens. A preempted job returns to WAITING.
    """

    WAITING = auto()
    FETCHING = auto()
    FETCHED = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class Content(Protocol):
    """The interface to the simulated KV of one job, and to the answer text that depends on it."""

    def states(self, start: int, end: int) -> Words:
        """Return the KV of tokens `start` to `end` - 1 of prompt and answer, one word per token.

        mockgpu/kv_bytes.py defines the words.
        """
        ...

    def replace_text(self, taint: int) -> None:
        """Replace the answer, because the KV of its prompt is wrong.

        `taint` is a digest of the wrong KV. Equal digests lead to equal answers.
        """
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One sequence (a prompt and its answer) to compute. After `add()`, the scheduler owns it.

    keys             keys of the full blocks of prompt and output. Blocks without a key are not
                     cached
    computed         tokens whose KV is present or planned: of the prompt, and after a preemption
                     also of the output
    cached           prompt tokens found in the prefix cache at admission; -1 before
    generated_count  output tokens so far. Outdated while decoding: use `Scheduler.count_output()`
    origin           while decoding: the scheduler's step counter minus the number of output tokens
    leg              which half of a split request it is. PrefillLeg: another engine fetches its KV.
                     DecodeLeg: its KV comes from another engine. None: it is a whole request
    content          content of its KV; None: the engine stores no KV bytes
    keeps_blocks     whether its blocks stay allocated at its end, until `Scheduler.release_kept()`
    offered          set at its end: the description of its KV for the other engine
    tokens           prompt and output, four bytes per token. Set only if the engine publishes KV
                     events or uses a KV store
    salt             cache salt, set under the same condition
    restores         whether to look up the beginning of its prompt in the KV store
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
        """Return how many tokens a prefill must compute: the prompt, plus the output if
        preempted.
        """
        return self.prompt_tokens + self.generated_count


@dataclass(slots=True)
class PrefillChunk:
    """The part of a prompt that one step computes: tokens `start` to `start + tokens` - 1."""

    job: Job
    start: int
    tokens: int
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """The work of one engine step.

    chunks          the parts of prompts to compute
    decode_seqs     number of jobs that decode one token each
    decode_context  sum of the contexts of these jobs, in tokens
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
    decoded           number of output tokens of jobs that were already decoding
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
