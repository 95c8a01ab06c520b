"""Continuous batching with chunked prefill, as vLLM's V1 scheduler does it: plan a step, run it, finish it.

Pure and clock-free: `step()` says what is computed next, roofline.py how long that takes, `finish()` what came of it.
The live server and a replay on virtual time run this same code. A step costs O(what changes): decoding sequences all
advance by one token a step, so one counter (`tick`) advances them; only those that end or need a block are touched.

Of a request split between two groups it does this group's half: a job whose KV comes from elsewhere gets all its
prompt's blocks before the first byte moves and then waits for `landed()`; one whose KV goes elsewhere leaves its blocks
in `kept` until `let_go()`. Who moves bytes is handoff/desk.py's.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from mockgpu.blocks import BlockPool, blocks_for
from mockgpu.handoff.legs import Take
from mockgpu.job import Chunk, Job, Outcome, Plan, State, Totals


class Scheduler:
    """The queue and the running batch of one TP group. Sole owner of its jobs and of its block pool."""

    def __init__(
        self, pool: BlockPool, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192
    ) -> None:
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
        self.fetching: dict[Job, None] = {}
        self.fetched: deque[Job] = deque()
        self.kept: dict[Job, list[int]] = {}
        # Told of every block that decoding has filled, before others may share it.
        self.on_filled: Callable[[Job, int], None] | None = None
        self._to_fetch: list[Job] = []
        self.totals = Totals()
        self.tick = 0
        self._context = 0
        # Decoding jobs by the tick at which each makes its last token; ticks at which none does are not in it.
        self._ends: defaultdict[int, dict[Job, None]] = defaultdict(dict)
        # Decoding jobs by the tick, modulo a block's tokens, at which each needs its next block.
        self._grows: list[dict[Job, None]] = [{} for _ in range(pool.block_tokens)]

    @property
    def running(self) -> int:
        """Jobs in the batch: prefilling or decoding."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def queued(self) -> int:
        """Jobs that compute nothing yet: waiting for room, for their KV, or for a place in the batch."""
        return len(self.waiting) + len(self.fetching) + len(self.fetched)

    @property
    def kept_blocks(self) -> int:
        """Blocks that no job here uses any more: other groups read them, or a transfer still writes them."""
        return sum(map(len, self.kept.values()))

    def fits(self, job: Job) -> bool:
        """Whether the job could run alone; one that could not must never be added."""
        return (
            blocks_for(job.prompt_tokens + job.output_tokens, self.pool.block_tokens)
            <= self.pool.total
        )

    def made(self, job: Job) -> int:
        """Output tokens of the job so far."""
        return self.tick - job.origin if job.state is State.DECODE else job.made

    def add(self, job: Job) -> None:
        """Queue a job, first come first served. ValueError when it could never fit."""
        if not self.fits(job):
            raise ValueError(
                f"{job.prompt_tokens} + {job.output_tokens} tokens exceed the group's KV cache"
            )
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Take a job out wherever it stands, at once, also between step() and finish(); its blocks are free again.

        Except those that its KV is being written to: they are kept, for `let_go()` to free when nobody writes any more.
        """
        if job.state is State.WAITING:
            self.waiting.remove(job)
        elif job.state is State.FETCHING:
            del self.fetching[job]
            self.kept[job], job.blocks = job.blocks, []
        elif job.state is State.FETCHED:
            self.fetched.remove(job)
            self.pool.release(job.blocks)
            job.blocks = []
        elif job.state is not State.DONE:
            self._leave(job)
        job.state = State.DONE

    def to_fetch(self) -> list[Job]:
        """Jobs admitted since the last call whose KV is to be fetched now.

        Those in FETCHING wait for `landed()` or `recompute()`; the others found all of it here.
        """
        jobs, self._to_fetch = self._to_fetch, []
        return jobs

    def landed(self, job: Job, cached: int) -> None:
        """The KV of a FETCHING job is there: only its last token is left to compute. `cached`: what usage will tell."""
        start, job.computed, job.cached = job.computed, job.prompt_tokens - 1, cached
        self._seal(job, start, job.prompt_tokens)
        self._fetched(job)

    def recompute(self, job: Job) -> None:
        """The KV of a FETCHING job will not come: it is computed here, in the blocks the job has."""
        self._fetched(job)

    def let_go(self, job: Job) -> None:
        """Free what was kept of a job that is over. No effect where nothing is."""
        self.pool.release(self.kept.pop(job, ()))

    def _fetched(self, job: Job) -> None:
        del self.fetching[job]
        job.state = State.FETCHED
        self.fetched.append(job)

    def step(self) -> Plan | None:
        """Plan the next step; None when there is nothing to compute. Decodes first, prompts with the budget left."""
        for job in list(self._grows[self.tick % self.pool.block_tokens]):
            if job.state is State.DECODE:
                self._grow(job)
        budget = self.max_num_batched_tokens - len(self.decoding)
        chunks: list[Chunk] = []
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
            if job.state is State.PREFILL:
                budget -= self._chunk(job, budget, chunks)
        if not chunks and not self.decoding:
            return None
        return Plan(chunks, len(self.decoding), self._context)

    def finish(self, plan: Plan) -> Outcome:
        """Account for a step that was run: tokens made, jobs done. Jobs aborted meanwhile are passed over."""
        decoded = len(self.decoding)
        self.tick += 1
        self._context += decoded
        ended = list(self._ends.pop(self.tick, ()))
        began = [
            chunk.job for chunk in plan.chunks if chunk.last and chunk.job.state is State.PREFILL
        ]
        for job in began:
            self._begin(job)
            if job.made == job.output_tokens:
                ended.append(job)
        for job in ended:
            self._leave(job, job.keep)
            job.state = State.DONE
        self.totals.prompt_tokens += sum(job.prompt_tokens for job in began if job.made == 1)
        self.totals.output_tokens += decoded + len(began)
        return Outcome(began, decoded, ended)

    def quiet(self, most: int) -> int:
        """How many steps from the planned one on (that one included) only decode, end nobody and preempt nobody.

        To be asked after `step()` planned a step without prompts; `leap()` may then take as many. At most `most`.
        """
        if not self.decoding or self.prefilling or self.fetched:
            return 0
        size, free = self.pool.block_tokens, self.pool.free
        steps = min(most, min(self._ends) - self.tick - 1)
        for ahead in range(1, steps + 1):
            growing = self._grows[(self.tick + ahead) % size]
            if growing:
                free -= len(growing)
                if free < 0 or (
                    self.waiting and any(len(job.blocks) <= len(job.keys) for job in growing)
                ):
                    return ahead - 1
        return steps

    def leap(self, steps: int) -> Plan:
        """Run `steps` quiet steps at once, as that many pairs of `finish()` and `step()` would; the plan after them."""
        decoded = len(self.decoding)
        for _ in range(steps):
            self.tick += 1
            growing = self._grows[self.tick % self.pool.block_tokens]
            if growing:
                for job in list(growing):
                    self._grow(job)
        self._context += decoded * steps
        self.totals.output_tokens += decoded * steps
        return Plan([], decoded, self._context)

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
        first = job.cached < 0
        if first:
            job.cached = job.computed
            self.totals.prefix_queries += job.prompt_tokens
            self.totals.prefix_hits += job.computed
        if first and isinstance(job.leg, Take):
            self._to_fetch.append(job)
            if job.leg.parked or job.computed < job.prompt_tokens - 1:
                # All of the prompt's room is taken before the first byte is on its way.
                job.blocks += [
                    self.pool.take() for _ in range(blocks_for(job.prompt_tokens, size) - hits)
                ]
                job.state = State.FETCHING
                self.fetching[job] = None
                return True
        self._prefill(job)
        return True

    def _prefill(self, job: Job) -> Job:
        job.state = State.PREFILL
        self.prefilling[job] = None
        return job

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
        self._seal(job, start, job.computed)
        chunks.append(Chunk(job, start, tokens, job.computed == job.known_tokens))
        return tokens

    def _seal(self, job: Job, start: int, end: int) -> None:
        """Name the blocks that the tokens [start, end) have filled."""
        size = self.pool.block_tokens
        for i in range(start // size, min(end // size, len(job.keys))):
            self.pool.seal(job.blocks[i], job.keys[i])

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
        """Take a job out of `_ends`, and its tick too if no other job ends then."""
        last_tick = job.origin + job.output_tokens
        if last_tick in self._ends:
            self._ends[last_tick].pop(job, None)
            if not self._ends[last_tick]:
                del self._ends[last_tick]

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
        if (
            filled <= len(job.keys)
            and job.prompt_tokens + self.made(job) > filled * self.pool.block_tokens
        ):
            if self.on_filled is not None:
                self.on_filled(job, filled - 1)
            self.pool.seal(job.blocks[-1], job.keys[filled - 1])

    def _preempt(self, job: Job) -> None:
        """Back to the head of the queue without any KV: it will be recomputed, as vLLM does."""
        self._leave(job)
        job.computed = 0
        job.state = State.WAITING
        job.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(job)

    def _leave(self, job: Job, keep: bool = False) -> None:
        """Out of the running batch, blocks given back (or kept for others to read), whatever the reason."""
        if job.state is State.DECODE:
            self._seal_filled(job)
            job.made = self.tick - job.origin
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
