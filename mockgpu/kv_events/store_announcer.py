"""StoreAnnouncer: publishes which of an engine's blocks are in the host's KV store, as KV events.

The store is shared by many engines, and evicts blocks without notice. So the engine regularly asks
where its blocks are, and publishes the changes. The event's medium is CPU for the store's memory,
and STORAGE for its disk.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvtransfer.store.block_keys import Key
from kvtransfer.store.store_index import IN_MEMORY, ON_DISK
from mockgpu.kv_events.numbered_event_batches import KvEventStream
from mockgpu.scheduler import Job

POLL_S = 0.2
BATCH_BLOCKS = 8192
MAX_BLOCKS = 1 << 16
MEDIA = ((IN_MEMORY, "CPU"), (ON_DISK, "STORAGE"))


class _Tracked(NamedTuple):
    job: Job
    number: int


class StoreAnnouncer:
    """Publishes KV events when blocks of this engine enter or leave the host's KV store.

    stream  the engine's KV events
    places  async function that returns one byte per block key, with one bit for each tier (memory,
            disk) of the store that has the block

    It watches the last MAX_BLOCKS blocks that were saved or fetched. Older blocks are published as
    removed.
    """

    def __init__(
        self, stream: KvEventStream, places: Callable[[Sequence[Key]], Awaitable[bytes]]
    ) -> None:
        self._stream, self._places = stream, places
        self._tracked: OrderedDict[Key, _Tracked] = OrderedDict()
        self._announced: dict[Key, int] = {}
        self._clears = stream.clears
        self._next = 0
        self._task = asyncio.ensure_future(self._poll())

    def track(self, job: Job, keys: Sequence[Key], first: int) -> None:
        """Begin to watch blocks of a job; events will say in which tiers of the store they are.

        keys   keys of the blocks
        first  position of the first of these blocks in the job
        """
        for index, key in enumerate(keys, first):
            self._tracked.pop(key, None)
            self._tracked[key] = _Tracked(job, index)
        while len(self._tracked) > MAX_BLOCKS:
            key, block = self._tracked.popitem(last=False)
            self._publish([(key, block, 0)])
            del self._announced[key]

    async def check(self) -> None:
        """Ask the store where the next watched blocks are, and record events for changes."""
        if self._clears != self._stream.clears:
            # Subscribers have forgotten all blocks of this engine.
            self._clears = self._stream.clears
            self._announced.clear()
        keys = list(self._tracked)
        if self._next >= len(keys):
            self._next = 0
        batch = keys[self._next : self._next + BATCH_BLOCKS]
        self._next += len(batch)
        if not batch:
            return
        places = await self._places(batch)
        found = [
            (key, self._tracked[key], bits)
            for key, bits in zip(batch, places, strict=True)
            if key in self._tracked
        ]
        self._publish(found)

    def _publish(self, found: Sequence[tuple[Key, _Tracked, int]]) -> None:
        for bit, medium in MEDIA:
            for key, block, bits in found:
                change = (bits ^ self._announced.get(key, 0)) & bit
                if change & bits:
                    self._stream.on_stored(block.job, block.number, medium)
                elif change:
                    self._stream.on_removed(block.job.keys[block.number], medium)
        self._announced |= {key: bits for key, _, bits in found}

    async def _poll(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        self._task.cancel()
