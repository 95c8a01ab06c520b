"""StoreTier: saves a mock engine's KV in the store that all engines of the host share.

- When a request ends, its blocks are saved.
- When a prompt arrives whose beginning the store has, blocks are fetched as long as fetching is
  faster than computing them (kvtransfer/store/fetch_rule.py).

The bytes really move (kvtransfer/store/). The duration is that of the real model's KV at the
simulated speeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvtransfer.store.block_keys import Key, block_keys, chain_root
from kvtransfer.store.client import StoreClient, StoreLostError
from kvtransfer.store.fetch_rule import FetchRule, StoredPrefix
from kvtransfer.store.reconnecting_client import StoreConnection
from kvtransfer.store.slot_format import Parts
from kvtransfer.store.store_index import IN_MEMORY
from mockgpu.handoff.link_speed import PacedLink
from mockgpu.kv_bytes import KvMemory
from mockgpu.kv_events.numbered_event_batches import KvEventStream
from mockgpu.kv_events.store_announcer import StoreAnnouncer
from mockgpu.kv_options import StoreSpec
from mockgpu.scheduler import Job, JobState, PrefillChunk, Scheduler, StepPlan

MAX_SAVES = 64
"""Maximum number of ended requests whose blocks are being saved at the same time.

Blocks of further requests are not saved.
"""

Result = TypeVar("Result")
Runner = Callable[[Callable[[], Any]], Awaitable[Any]]
"""A function that runs a blocking call, such as a request to the store, without blocking the event
loop.
"""


class StoreOwner(Protocol):
    """The attributes of a mock engine that StoreTier uses: the scheduler, and the KV memory."""

    scheduler: Scheduler
    memory: KvMemory | None

    def wake(self) -> None: ...


class StoreTier:
    """Saves KV blocks of one mock engine in its host's store, and fetches them from there.

    owner          the engine
    spec           path and simulated speeds of the store
    token_bytes    KV bytes per token of the real model
    compatibility  text of all that the bytes of a block depend on, such as model and layout.
                   Engines with different texts share no blocks
    speed          factor by which simulated time is faster than real time
    run            function that runs blocking calls; None: they run in a thread of this object
    store          the connection to the store

    Raises ValueError if the store is not running, or if its slots are too small.
    """

    def __init__(
        self,
        owner: StoreOwner,
        spec: StoreSpec,
        token_bytes: int,
        compatibility: str,
        speed: float = 1.0,
        run: Runner | None = None,
    ) -> None:
        assert owner.memory is not None
        self._owner, self._spec, self._compatibility = owner, spec, compatibility
        self._memory = owner.memory
        scheduler = owner.scheduler
        size = scheduler.pool.block_tokens
        self._rule = FetchRule(size, scheduler.max_num_batched_tokens)
        self._block_bytes = sum(region.block_bytes for region in self._memory.regions)
        self._threads = ThreadPoolExecutor(1, "kv-store")
        self._run: Runner = self._run_in_thread if run is None else run
        self._down = PacedLink(token_bytes, spec.bytes_s, speed)
        self._up = PacedLink(token_bytes, spec.bytes_s, speed)
        self._disk = PacedLink(token_bytes, spec.disk_bytes_s, speed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._saves = 0
        self.queried_tokens = self.hit_tokens = self.disk_tokens = self.declined_tokens = 0
        self.saved_blocks = self.skipped_saves = 0
        self._announcer: StoreAnnouncer | None = None
        self.store = StoreConnection(Path(spec.path), self._block_bytes)
        try:
            self.store.open()
        except StoreLostError as error:
            raise ValueError(str(error)) from None

    @property
    def running_tasks(self) -> int:
        return len(self._tasks)

    def announce_on(self, stream: KvEventStream) -> None:
        """Begin to publish KV events when this engine's blocks enter or leave the host's store.

        `stream` collects the engine's KV events.
        """
        self._announcer = StoreAnnouncer(stream, self.places)

    def fetch(self, job: Job, chunks: Sequence[PrefillChunk]) -> None:
        """Fetch the beginning of a job's prompt from the store, then continue the job.

        The job is in the state FETCHING. Blocks are fetched as long as that is faster than to
        compute them. The fetch runs at the same time as the step that begins now, which computes
        `chunks`.
        """
        step_s = sum(self._rule.compute_s(part.start, part.start + part.tokens) for part in chunks)
        self._spawn(self._fetch(job, step_s))

    def on_step(self, plan: StepPlan, step_s: float) -> None:
        """Learn from a step that took `step_s` seconds how fast the engine computes prompts."""
        if plan.chunks:
            work = plan.work
            self._rule.on_step(work.prefill_tokens, work.attention_area, step_s)

    def save(self, job: Job) -> None:
        """Save the cached blocks of a job that has just ended.

        The blocks stay in use until saved.
        """
        pool = self._owner.scheduler.pool
        count = pool.count_hits(job.keys, len(job.keys))
        if not count or not job.tokens:
            return
        if self._saves >= MAX_SAVES:
            self.skipped_saves += 1
            return
        self._saves += 1
        self._spawn(self._save(job, pool.acquire_cached(job.keys, count)))

    async def _fetch(self, job: Job, step_s: float) -> None:
        scheduler, size = self._owner.scheduler, self._owner.scheduler.pool.block_tokens
        first = job.computed // size
        blocks = list(job.blocks[first : (job.prompt_tokens - 1) // size])
        keys = self._keys(job)[first : first + len(blocks)]
        try:
            self.queried_tokens += job.prompt_tokens - job.computed
            places = (await self.places(keys)).partition(b"\0")[0]
            wanted = self._choose(job, places, step_s)
            count = on_disk = 0
            if wanted:
                count, on_disk = await self._fetch_blocks(keys[:wanted], blocks, places[:wanted])
            if job.state is JobState.FETCHING:
                scheduler.on_restored(job, count)
                self.hit_tokens += count * size
                self.disk_tokens += on_disk * size
                self.declined_tokens += (len(places) - wanted) * size
                self._announce(job, first, first + len(places))
        finally:
            # The store does not write to the blocks any more, so an aborted job can free them.
            scheduler.release_kept(job)
            self._owner.wake()

    def _choose(self, job: Job, places: bytes, step_s: float) -> int:
        scheduler, rule = self._owner.scheduler, self._rule
        busy_s = step_s + sum(
            rule.compute_s(other.computed, other.known_tokens)
            for other in (*scheduler.prefilling, *scheduler.fetched)
        )
        prefix = StoredPrefix(job.computed, job.prompt_tokens, places, busy_s)
        return rule.choose(prefix, asyncio.get_running_loop().time())

    async def _fetch_blocks(
        self, keys: Sequence[Key], blocks: Sequence[int], places: bytes
    ) -> tuple[int, int]:
        # Return how many leading blocks were read, and how many of them were on disk alone.
        size, now = self._owner.scheduler.pool.block_tokens, asyncio.get_running_loop().time
        pending, count = self._rule.begin(places, now()), 0
        try:
            count = await self._call(lambda client: self._get(client, keys, blocks), 0)
            on_disk = sum(not bits & IN_MEMORY for bits in places[:count])
            if count:  # at once if the store is lost: the job computes its prompt
                await self._disk.transfer(on_disk * size)
                await self._down.transfer(count * size)
        finally:
            self._rule.end(pending, now(), is_complete=count == len(places))
        return count, on_disk

    async def _save(self, job: Job, blocks: list[int]) -> None:
        size = self._owner.scheduler.pool.block_tokens
        try:
            keys = self._keys(job)[: len(blocks)]
            stored = await self._call(lambda client: self._put(client, keys, blocks), 0)
            if stored:
                await self._up.transfer(stored * size)
            self.saved_blocks += stored
            self._announce(job, 0, len(blocks))
        finally:
            self._saves -= 1
            self._owner.scheduler.pool.release(blocks)
            self._owner.wake()

    def _get(self, client: StoreClient, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        # Return how many leading blocks were read.
        return client.get(keys, [self._parts(block) for block in blocks[: len(keys)]])

    def _put(self, client: StoreClient, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        return client.put(keys, [self._parts(block) for block in blocks])

    def _parts(self, block: int) -> Parts:
        # Return the memory of one block, as one part per rank.
        return [
            region.bytes[block * region.block_bytes : (block + 1) * region.block_bytes].data
            for region in self._memory.regions
        ]

    def _keys(self, job: Job) -> list[Key]:
        root = chain_root(self._compatibility, job.salt)
        return block_keys(root, job.tokens, self._owner.scheduler.pool.block_tokens)

    async def _call(self, call: Callable[[StoreClient], Result], if_lost: Result) -> Result:
        # Call the store in a thread; return `if_lost` if it is lost.
        result: Result = await self._run(lambda: self.store.call(call, if_lost))
        return result

    async def places(self, keys: Sequence[Key]) -> bytes:
        """Return one byte per block, with one bit for each tier of the store that has the block.

        All bytes are 0 if the connection to the store has failed.
        """
        return await self._call(lambda client: client.places(keys), bytes(len(keys)))

    async def _run_in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _announce(self, job: Job, first: int, last: int) -> None:
        if self._announcer is not None:
            self._announcer.track(job, self._keys(job)[first:last], first)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lines(self, labels: str) -> Iterator[str]:
        """Yield the metrics of this engine's use of the store, in Prometheus text format."""
        counters = {
            "vllm:external_prefix_cache_queries": self.queried_tokens,
            "vllm:external_prefix_cache_hits": self.hit_tokens,
            "mock:kv_store_disk_tokens": self.disk_tokens,
            "mock:kv_store_declined_tokens": self.declined_tokens,
            "mock:kv_store_saved_blocks": self.saved_blocks,
            "mock:kv_store_skipped_saves": self.skipped_saves,
            "mock:kv_store_lost_calls": self.store.lost_calls,
        }
        for name, value in counters.items():
            yield f"# TYPE {name} counter"
            yield f"{name}_total{{{labels}}} {value}"

    async def close(self) -> None:
        """Wait until no call accesses the engine's blocks, then disconnect from the store."""
        if self._announcer is not None:
            self._announcer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()
        self.store.close()
