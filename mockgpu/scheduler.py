"""The scheduler of a mock engine: its jobs (sequences), and continuous batching as in vLLM's V1.

It does no I/O and has no clock: `step()` plans the next step, roofline.py computes its duration,
`finish()` applies the result. A live server and a replay in simulated time run the same code. One
counter (`tick`) advances all decoding sequences, so that a step costs only its changes: sequences
that end or need a block.

In a split request, a job whose KV comes from another engine gets all blocks of its prompt first,
and then waits for `on_landed()`. A job whose KV goes to another engine leaves its blocks in `kept`
until `release_kept()`. Bytes are moved by mockgpu/handoff/kv_handoff.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from mockgpu.paged_kv_cache import BlockPool, blocks_for
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
    """The interface to a job's simulated KV, and to the answer text that depends on it."""

    def states(self, start: int, end: int) -> Words:
        """Return the simulated KV of tokens `start` to `end` - 1 of prompt and answer.

        It has one 64-bit word per token. mockgpu/kv_bytes.py explains the words.
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
        """Return the number of tokens that a prefill of this job must compute.

        They are those of the prompt. If the job was preempted, its output so far is computed again.
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
    """Which jobs one engine step has advanced or ended.

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


class Scheduler:
    """The queue and the running batch of one engine. It owns its jobs and all KV blocks."""

    def __init__(
        self, pool: BlockPool, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192
    ) -> None:
        if not 0 < max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                "max_num_seqs must be above 0 and at most max_num_batched_tokens, got "
                f"{max_num_seqs} and {max_num_batched_tokens}"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Job] = deque()
        self.prefilling: dict[Job, None] = {}
        self.decoding: dict[Job, None] = {}
        self.fetching: dict[Job, None] = {}
        self.fetched: deque[Job] = deque()
        self.kept: dict[Job, list[int]] = {}
        # Callback for every block that decoding has filled, before the block can be shared.
        self.on_filled: Callable[[Job, int], None] | None = None
        # Callback for every block of a job that enters the prefix cache. The number is the block's
        # index in the job.
        self.on_shared: Callable[[Job, int], None] | None = None
        # Callback: whether there is more to restore of a job than so many of its blocks. None: each
        # job that may be restored waits until it is known.
        self.has_stored: Callable[[Job, int], bool] | None = None
        self._to_fetch: list[Job] = []
        self.totals = Totals()
        self.tick = 0
        self._context = 0
        # Decoding jobs by the tick of their last token. Ticks without such jobs are absent.
        self._ends: defaultdict[int, dict[Job, None]] = defaultdict(dict)
        # Decoding jobs by the tick, modulo the block size, at which each needs its next block.
        self._grows: list[dict[Job, None]] = [{} for _ in range(pool.block_tokens)]

    @property
    def running(self) -> int:
        """Return the number of jobs in the running batch, which prefill or decode."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def queued(self) -> int:
        """Return the number of jobs that do not run yet.

        They wait for free KV blocks, for KV from elsewhere, or for a place in the running batch.
        """
        return len(self.waiting) + len(self.fetching) + len(self.fetched)

    @property
    def kept_blocks(self) -> int:
        """Return the number of KV blocks of ended jobs that are kept, because they are in use."""
        return sum(map(len, self.kept.values()))

    def fits(self, job: Job) -> bool:
        """Return whether the KV cache, if empty, is large enough for this job."""
        return (
            blocks_for(job.prompt_tokens + job.output_tokens, self.pool.block_tokens)
            <= self.pool.total
        )

    def count_output(self, job: Job) -> int:
        """Return the number of output tokens that the job has generated so far."""
        return self.tick - job.origin if job.state is JobState.DECODE else job.generated_count

    def add(self, job: Job) -> None:
        """Add a job to the end of the engine's queue.

        Raises ValueError if the job is larger than the whole KV cache.
        """
        if not self.fits(job):
            raise ValueError(
                f"a request with {job.prompt_tokens} prompt tokens and {job.output_tokens} "
                "output tokens does not fit into the group's KV cache"
            )
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Remove a job in any state, and free its KV blocks. Allowed between step() and finish().

        If a transfer is writing to the blocks, they are kept until `release_kept()`.
        """
        if job.state is JobState.WAITING:
            self.waiting.remove(job)
        elif job.state is JobState.FETCHING:
            del self.fetching[job]
            self.kept[job], job.blocks = job.blocks, []
        elif job.state is JobState.FETCHED:
            self.fetched.remove(job)
            self.pool.release(job.blocks)
            job.blocks = []
        elif job.state is not JobState.DONE:
            self._remove(job)
        job.state = JobState.DONE

    def to_fetch(self) -> list[Job]:
        """Return the jobs with KV from elsewhere that have got blocks since the last call.

        A job in the state FETCHING waits for `on_landed()`, `on_restored()` or `recompute()`. The
        KV of the other jobs is already cached here.
        """
        jobs, self._to_fetch = self._to_fetch, []
        return jobs

    def on_landed(self, job: Job, cached: int) -> None:
        """Continue a FETCHING job whose KV has arrived. It computes the rest of its prompt.

        That is the last prompt token alone, unless only the KV of the prompt's beginning was
        offered. `cached` is the number of cached tokens to report in the response's usage.
        """
        assert isinstance(job.leg, DecodeLeg)
        start, job.cached = job.computed, cached
        job.computed = job.leg.loadable_tokens(job.prompt_tokens)
        self._seal(job, start, job.prompt_tokens if job.leg.tokens is None else job.computed)
        self._mark_fetched(job)

    def on_restored(self, job: Job, blocks: int) -> None:
        """Continue a FETCHING job after `blocks` more blocks of its prompt arrived from the store.

        It computes the rest of the prompt.
        """
        start = job.computed
        job.computed += blocks * self.pool.block_tokens
        job.cached = job.computed
        self._seal(job, start, job.computed)
        self._mark_fetched(job)

    def recompute(self, job: Job) -> None:
        """Continue a FETCHING job whose KV transfer has failed.

        The job computes its whole prompt at this engine.
        """
        self._mark_fetched(job)

    def release_kept(self, job: Job) -> None:
        """Free the KV blocks that are kept for an ended job. Does nothing if there are none."""
        self.pool.release(self.kept.pop(job, ()))

    def _mark_fetched(self, job: Job) -> None:
        del self.fetching[job]
        job.state = JobState.FETCHED
        self.fetched.append(job)

    def step(self) -> StepPlan | None:
        """Plan the next step: all decodes, then prompts within the token budget. None: idle."""
        for job in list(self._grows[self.tick % self.pool.block_tokens]):
            if job.state is JobState.DECODE:
                self._grow(job)
        budget = self.max_num_batched_tokens - len(self.decoding)
        chunks: list[PrefillChunk] = []
        for job in self.prefilling:
            budget -= self._chunk(job, budget, chunks)
        while budget > 0 and self.fetched and self.running < self.max_num_seqs:
            budget -= self._chunk(self._prefill(self.fetched.popleft()), budget, chunks)
        while (
            budget > 0
            and self.waiting
            and self.running < self.max_num_seqs
            and self._admit(self.waiting[0])
        ):
            job = self.waiting.popleft()
            if job.state is JobState.PREFILL:
                budget -= self._chunk(job, budget, chunks)
        if not chunks and not self.decoding:
            return None
        return StepPlan(chunks, len(self.decoding), self._context)

    def finish(self, plan: StepPlan) -> StepOutcome:
        """Apply a planned step that has ended, and return its result. Skips aborted jobs."""
        decoded = len(self.decoding)
        self.tick += 1
        self._context += decoded
        ended = list(self._ends.pop(self.tick, ()))
        first_token_jobs = [
            chunk.job
            for chunk in plan.chunks
            if chunk.is_last and chunk.job.state is JobState.PREFILL
        ]
        for job in first_token_jobs:
            self._begin(job)
            if job.generated_count == 1:
                self.totals.prompt_tokens += job.prompt_tokens
            if job.generated_count == job.output_tokens:
                ended.append(job)
        for job in ended:
            self._remove(job, job.keeps_blocks)
            job.state = JobState.DONE
        self.totals.output_tokens += decoded + len(first_token_jobs)
        return StepOutcome(first_token_jobs, decoded, ended)

    def decode_only_steps(self, most: int) -> int:
        """Return the number of steps, from the planned one on, in which jobs only decode.

        At most `most` steps are considered. No sequence ends or is preempted in them. Call this
        after `step()` has planned a step without prompts. `advance()` can then run that many steps
        at once.
        """
        if not self.decoding or self.prefilling or self.fetched:
            return 0
        size, free, grows, tick = self.pool.block_tokens, self.pool.free, self._grows, self.tick
        steps = min(most, min(self._ends) - tick - 1)
        if not self.waiting and len(self.decoding) * -(-steps // size) <= free:
            return steps  # each sequence needs at most one block in `size` steps
        for ahead in range(1, steps + 1):
            growing = grows[(tick + ahead) % size]
            if growing:
                free -= len(growing)
                if free < 0 or (
                    self.waiting and any(len(job.blocks) <= len(job.keys) for job in growing)
                ):
                    return ahead - 1
        return steps

    def advance(self, steps: int) -> StepPlan:
        """Compute `steps` decode-only steps at once, and return the plan of the following step.

        The call is equivalent to that many pairs of `finish()` and `step()`.
        """
        decoded, size, grows = len(self.decoding), self.pool.block_tokens, self._grows
        first = self.tick + 1
        for tick in range(first, first + steps):
            growing = grows[tick % size]
            if growing:
                self.tick = tick
                for job in list(growing):
                    self._grow(job)
        self.tick = first + steps - 1
        self._context += decoded * steps
        self.totals.output_tokens += decoded * steps
        return StepPlan([], decoded, self._context)

    def _admit(self, job: Job) -> bool:
        # Admit the queue's first job with its cached blocks, and return whether its prompt fits.
        #
        # Only the blocks of the next chunk are allocated now. The whole prompt must fit, because
        # long prompts would otherwise starve each other.
        size = self.pool.block_tokens
        # The last token is always computed, because the first output token depends on its logits.
        hits = self.pool.count_hits(job.keys, (job.known_tokens - 1) // size)
        needed = (
            blocks_for(job.known_tokens, size) - hits + self.pool.count_free_hits(job.keys, hits)
        )
        if needed > self.pool.free - self._reserved_blocks():
            return False
        job.blocks = self.pool.acquire_cached(job.keys, hits)
        job.computed = hits * size
        first = job.cached < 0
        if first:
            job.cached = job.computed
            self.totals.prefix_queries += job.prompt_tokens
            self.totals.prefix_hits += job.computed
        if first and isinstance(job.leg, DecodeLeg):
            self._to_fetch.append(job)
            if job.leg.is_parked or job.computed < job.leg.loadable_tokens(job.prompt_tokens):
                self._await_kv(job)
                return True
        elif first and job.restores and self._may_restore(job, hits):
            self._to_fetch.append(job)
            self._await_kv(job)
            return True
        self._prefill(job)
        return True

    def _may_restore(self, job: Job, hits: int) -> bool:
        if hits >= (job.prompt_tokens - 1) // self.pool.block_tokens:
            return False
        return self.has_stored is None or self.has_stored(job, hits)

    def _await_kv(self, job: Job) -> None:
        # Allocate all of the prompt's blocks before the first byte moves.
        missing = blocks_for(job.prompt_tokens, self.pool.block_tokens) - len(job.blocks)
        job.blocks += self.pool.allocate_blocks(missing)
        job.state = JobState.FETCHING
        self.fetching[job] = None

    def _prefill(self, job: Job) -> Job:
        job.state = JobState.PREFILL
        self.prefilling[job] = None
        return job

    def _reserved_blocks(self) -> int:
        size = self.pool.block_tokens
        return sum(blocks_for(job.known_tokens, size) - len(job.blocks) for job in self.prefilling)

    def _chunk(self, job: Job, budget: int, chunks: list[PrefillChunk]) -> int:
        # Plan the next chunk of a prompt and return its number of tokens.
        #
        # Returns 0 if the KV cache or the budget is exhausted.
        size = self.pool.block_tokens
        room = (len(job.blocks) + self.pool.free) * size - job.computed
        tokens = min(job.known_tokens - job.computed, budget, room)
        if tokens <= 0:
            return 0
        start, job.computed = job.computed, job.computed + tokens
        missing = blocks_for(job.computed, size) - len(job.blocks)
        if missing > 0:
            job.blocks += self.pool.allocate_blocks(missing)
        self._seal(job, start, job.computed)
        chunks.append(PrefillChunk(job, start, tokens, job.computed == job.known_tokens))
        return tokens

    def _seal(self, job: Job, start: int, end: int) -> None:
        size = self.pool.block_tokens
        first, last = start // size, min(end // size, len(job.keys))
        if self.on_shared is None:  # in a simulation, no other part uses a new block
            self.pool.register_blocks(job.blocks[first:last], job.keys[first:last])
            return
        for i in range(first, last):
            self._share(job, i)

    def _share(self, job: Job, index: int) -> None:
        is_new = self.pool.register(job.blocks[index], job.keys[index])
        if is_new and self.on_shared is not None:
            self.on_shared(job, index)

    def _begin(self, job: Job) -> None:
        # Move a job from prefill to decode, and count its first output token.
        #
        # From now on `tick` counts its tokens.
        del self.prefilling[job]
        job.generated_count += 1
        job.origin = self.tick - job.generated_count
        job.state = JobState.DECODE
        self.decoding[job] = None
        self._context += job.known_tokens
        self._ends[job.origin + job.output_tokens][job] = None
        self._grows[self._growth_phase(job)][job] = None

    def _growth_phase(self, job: Job) -> int:
        return (1 - job.prompt_tokens + job.origin) % self.pool.block_tokens

    def _forget_end(self, job: Job) -> None:
        last_tick = job.origin + job.output_tokens
        if last_tick in self._ends:
            self._ends[last_tick].pop(job, None)
            if not self._ends[last_tick]:
                del self._ends[last_tick]

    def _grow(self, job: Job) -> None:
        # Share the block that a decoding job has filled, and allocate its next block.
        #
        # If no block is free, the newest jobs are preempted.
        self._seal_filled(job)
        while not self.pool.free and job.state is JobState.DECODE:
            self._preempt(next(reversed(self.prefilling or self.decoding)))
        if job.state is JobState.DECODE:
            job.blocks.append(self.pool.allocate())

    def _seal_filled(self, job: Job) -> None:
        # Add a decoding job's last block to the prefix cache, if it is full.
        filled = len(job.blocks)
        if (
            filled <= len(job.keys)
            and job.prompt_tokens + self.count_output(job) > filled * self.pool.block_tokens
        ):
            if self.on_filled is not None:
                self.on_filled(job, filled - 1)
            self._share(job, filled - 1)

    def _preempt(self, job: Job) -> None:
        # Move a job to the front of the queue and drop its KV, to be recomputed as in vLLM.
        self._remove(job)
        job.computed = 0
        job.state = JobState.WAITING
        job.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(job)

    def _remove(self, job: Job, keep: bool = False) -> None:
        # Remove a job from the batch and free its blocks; `keep` keeps them for other engines.
        if job.state is JobState.DECODE:
            self._seal_filled(job)
            job.generated_count = self.tick - job.origin
            self._context -= job.known_tokens
            del self.decoding[job]
            del self._grows[self._growth_phase(job)][job]
            self._forget_end(job)
        else:
            del self.prefilling[job]
        if keep:
            self.kept[job] = job.blocks
        else:
            self.pool.release(job.blocks)
        job.blocks = []
