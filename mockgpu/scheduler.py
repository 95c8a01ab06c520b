"""Continuous batching with chunked prefill, as vLLM's V1 scheduler does it: plan a step, run it, finish it.

Pure and clock-free: `step()` says what is computed next, roofline.py how long that takes, `finish()` what came of it.
The live server and a replay on virtual time run this same code. A step costs O(what changes): decoding sequences all
advance by one token a step, so one counter (`tick`) advances them; only those that end or need a block are touched.
"""

from __future__ import annotations

from collections import defaultdict, deque

from mockgpu.blocks import BlockPool, blocks_for
from mockgpu.job import Chunk, Job, Outcome, Plan, State, Totals


class Scheduler:
    """The queue and the running batch of one TP group. Sole owner of its jobs and of its block pool."""

    def __init__(self, pool: BlockPool, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192) -> None:
        if not 0 < max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"need 0 < max_num_seqs <= max_num_batched_tokens, got {max_num_seqs}, {max_num_batched_tokens}"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Job] = deque()
        self.prefilling: dict[Job, None] = {}
        self.decoding: dict[Job, None] = {}
        self.totals = Totals()
        self.tick = 0
        self._context = 0
        self._ends: defaultdict[int, dict[Job, None]] = defaultdict(dict)
        # Decoding jobs by the tick, modulo a block's tokens, at which each needs its next block.
        self._grows: list[dict[Job, None]] = [{} for _ in range(pool.block_tokens)]

    @property
    def running(self) -> int:
        """Jobs admitted and not done."""
        return len(self.prefilling) + len(self.decoding)

    def fits(self, job: Job) -> bool:
        """Whether the job could run alone; one that could not must never be added."""
        return blocks_for(job.prompt_tokens + job.output_tokens, self.pool.block_tokens) <= self.pool.total

    def made(self, job: Job) -> int:
        """Output tokens of the job so far."""
        return self.tick - job.origin if job.state is State.DECODE else job.made

    def add(self, job: Job) -> None:
        """Queue a job, first come first served. ValueError when it could never fit."""
        if not self.fits(job):
            raise ValueError(f"{job.prompt_tokens} + {job.output_tokens} tokens exceed the group's KV cache")
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Take a job out wherever it stands, at once, also between step() and finish(); its blocks are free again."""
        if job.state is State.WAITING:
            self.waiting.remove(job)
        elif job.state is not State.DONE:
            self._leave(job)
        job.state = State.DONE

    def step(self) -> Plan | None:
        """Plan the next step; None when there is nothing to compute. Decodes first, prompts with the budget left."""
        for job in list(self._grows[self.tick % self.pool.block_tokens]):
            if job.state is State.DECODE:
                self._grow(job)
        budget = self.max_num_batched_tokens - len(self.decoding)
        chunks: list[Chunk] = []
        for job in self.prefilling:
            budget -= self._chunk(job, budget, chunks)
        while budget > 0 and self.waiting and self.running < self.max_num_seqs and self._admit(self.waiting[0]):
            budget -= self._chunk(self.waiting.popleft(), budget, chunks)
        if not chunks and not self.decoding:
            return None
        return Plan(chunks, len(self.decoding), self._context)

    def finish(self, plan: Plan) -> Outcome:
        """Account for a step that was run: tokens made, jobs done. Jobs aborted meanwhile are passed over."""
        decoded = len(self.decoding)
        self.tick += 1
        self._context += decoded
        ended = list(self._ends.pop(self.tick, ()))
        began = [chunk.job for chunk in plan.chunks if chunk.last and chunk.job.state is State.PREFILL]
        for job in began:
            self._begin(job)
            if job.made == job.output_tokens:
                ended.append(job)
        for job in ended:
            self._leave(job)
            job.state = State.DONE
        self.totals.prompt_tokens += sum(job.prompt_tokens for job in began if job.made == 1)
        self.totals.output_tokens += decoded + len(began)
        return Outcome(began, decoded, ended)

    def _admit(self, job: Job) -> bool:
        """Give the head of the queue what is cached of it, if the rest of its prompt fits as well.

        Only the chunk's blocks are taken now, yet the whole prompt must fit: else long prompts would starve each other.
        """
        size = self.pool.block_tokens
        # The last token is always computed: its logits are what the first output token is drawn from.
        hits = self.pool.hits(job.keys, (job.known_tokens - 1) // size)
        needed = blocks_for(job.known_tokens, size) - hits + self.pool.idle_hits(job.keys, hits)
        if needed > self.pool.free - self._promised():
            return False
        job.blocks = self.pool.share(job.keys, hits)
        job.computed = hits * size
        if job.cached < 0:
            job.cached = job.computed
            self.totals.prefix_queries += job.prompt_tokens
            self.totals.prefix_hits += job.computed
        job.state = State.PREFILL
        self.prefilling[job] = None
        return True

    def _promised(self) -> int:
        """Blocks that prompts under way still need."""
        size = self.pool.block_tokens
        return sum(blocks_for(job.known_tokens, size) - len(job.blocks) for job in self.prefilling)

    def _chunk(self, job: Job, budget: int, chunks: list[Chunk]) -> int:
        """Plan the next piece of a prompt; the tokens it takes from the budget, 0 when KV or budget is out."""
        size = self.pool.block_tokens
        room = (len(job.blocks) + self.pool.free) * size - job.computed
        tokens = min(job.known_tokens - job.computed, budget, room)
        if tokens <= 0:
            return 0
        start, job.computed = job.computed, job.computed + tokens
        while len(job.blocks) * size < job.computed:
            job.blocks.append(self.pool.take())
        for i in range(start // size, min(job.computed // size, len(job.keys))):
            self.pool.seal(job.blocks[i], job.keys[i])
        chunks.append(Chunk(job, start, tokens, job.computed == job.known_tokens))
        return tokens

    def _begin(self, job: Job) -> None:
        """The prompt is computed, and with it one more token made: from here the tick advances the job."""
        del self.prefilling[job]
        job.made += 1
        job.origin = self.tick - job.made
        job.state = State.DECODE
        self.decoding[job] = None
        self._context += job.known_tokens
        self._ends[job.origin + job.output_tokens][job] = None
        self._grows[self._growth_phase(job)][job] = None

    def _growth_phase(self, job: Job) -> int:
        """Ticks at which prompt + made tokens are one more than a multiple of a block."""
        return (1 - job.prompt_tokens + job.origin) % self.pool.block_tokens

    def _forget_end(self, job: Job) -> None:
        """Out of the calendar of ends; a day without ends leaves it too."""
        day = job.origin + job.output_tokens
        if day in self._ends:
            self._ends[day].pop(job, None)
            if not self._ends[day]:
                del self._ends[day]

    def _grow(self, job: Job) -> None:
        """Seal the block just filled and take the next one, preempting the newest jobs while none is free."""
        self._seal_filled(job)
        while not self.pool.free and job.state is State.DECODE:
            self._preempt(next(reversed(self.prefilling or self.decoding)))
        if job.state is State.DECODE:
            job.blocks.append(self.pool.take())

    def _seal_filled(self, job: Job) -> None:
        """Name a decoding job's last block, if the KV of all its tokens is there."""
        filled = len(job.blocks)
        if filled <= len(job.keys) and job.prompt_tokens + self.made(job) > filled * self.pool.block_tokens:
            self.pool.seal(job.blocks[-1], job.keys[filled - 1])

    def _preempt(self, job: Job) -> None:
        """Back to the head of the queue without any KV: it will be recomputed, as vLLM does."""
        self._leave(job)
        job.computed = 0
        job.state = State.WAITING
        job.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(job)

    def _leave(self, job: Job) -> None:
        """Out of the running batch, blocks given back, whatever the reason."""
        if job.state is State.DECODE:
            self._seal_filled(job)
            job.made = self.tick - job.origin
            self._context -= job.known_tokens
            del self.decoding[job]
            del self._grows[self._growth_phase(job)][job]
            self._forget_end(job)
        else:
            del self.prefilling[job]
        self.pool.release(job.blocks)
        job.blocks = []
