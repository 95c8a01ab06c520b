"""Loads and saves KV blocks of one vLLM worker from and to its host's store.

The scheduler decides which blocks to copy. StoreWorker copies them on two threads of its own, so
that loads do not wait for saves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import msgspec

from kvtransfer.engines.vllm.connector_counters import PendingCounts
from kvtransfer.engines.vllm.handoff_worker import FinishedTransfers
from kvtransfer.engines.vllm.store_scheduler import BlockOrder, StepWork, StoreOrders, StoreReport
from kvtransfer.layout.block_pieces import BlockPieces
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.store.block_keys import Key, rank_keys
from kvtransfer.store.client import StoreClient
from kvtransfer.store.reconnecting_client import StoreConnection
from kvtransfer.store.slot_format import Parts

Copy: TypeAlias = Callable[[StoreClient, list[Key], list[Parts]], int]
"""Copies blocks between memory and a store, and returns how many."""


class CopyResult(msgspec.Struct, frozen=True):
    """How a load from the store, or a save to it, has ended.

    blocks   number of blocks that were copied
    seconds  duration of the copy
    is_lost  whether the connection to the store failed
    """

    blocks: int
    seconds: float
    is_lost: bool


class CopyThread:
    """Copies KV blocks between the memory of one rank and the host's store.

    It executes its instructions in order.
    """

    def __init__(
        self,
        name: str,
        store: StoreConnection,
        parts_of: Callable[[int], Parts],
        rank: int,
        copy: Copy,
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._parts_of, self._rank = store, parts_of, rank
        self._copy, self._on_change, self._clock = copy, on_change, clock
        self._thread = ThreadPoolExecutor(1, name)
        # Connect now: the first copy would otherwise be measured with it.
        self._thread.submit(store.call, lambda client: 0, 0)
        self._results: dict[str, Future[CopyResult]] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._results

    @property
    def is_idle(self) -> bool:
        return not self._results

    def start(self, order: BlockOrder) -> None:
        future = self._thread.submit(self._run, order)
        self._results[order.request] = future
        future.add_done_callback(lambda _: self._on_change())

    def _run(self, order: BlockOrder) -> CopyResult:
        began_s = self._clock()
        keys = rank_keys(order.keys, self._rank)
        parts = [self._parts_of(block) for block in order.blocks]
        blocks = self._store.call(lambda client: self._copy(client, keys, parts), -1)
        return CopyResult(max(0, blocks), self._clock() - began_s, blocks < 0)

    def take_ended(self) -> dict[str, CopyResult]:
        """Return the loads and saves that have ended since the last call, by request."""
        ended = [request for request, future in self._results.items() if future.done()]
        return {request: self._results.pop(request).result() for request in ended}

    def close(self) -> None:
        """Stop: wait for the running copy, drop what has not begun, and disconnect from the
        store.
        """
        self._thread.shutdown(cancel_futures=True)
        self._store.close()


class StoreWorker:
    """Loads KV blocks of one vLLM rank from the host's store, and saves them to it.

    All methods are called on one thread.

    memory     the rank's KV memory
    connect    returns a new connection to the store, one per thread
    on_change  called on a thread of this object when a load or a save has ended
    clock      a clock of this process, in seconds
    """

    def __init__(
        self,
        layout: KvLayout,
        rank: int,
        memory: memoryview,
        connect: Callable[[], StoreConnection],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        pieces = BlockPieces(layout, rank)

        def parts_of(block: int) -> Parts:
            return pieces.of(memory, block)

        def thread(name: str, copy: Copy) -> CopyThread:
            return CopyThread(name, connect(), parts_of, rank, copy, on_change, clock)

        self._loads = thread("kv-load", StoreClient.get)
        self._saves = thread("kv-save", StoreClient.put)
        self._wanted: dict[str, int] = {}
        self._report = StoreReport()
        self.counts = PendingCounts()

    @property
    def is_idle(self) -> bool:
        return self._loads.is_idle and self._saves.is_idle

    def is_saving(self, request: str) -> bool:
        """Return whether the blocks of an ended request are still being read for a save."""
        return request in self._saves

    def execute(self, orders: StoreOrders, step_s: float) -> None:
        """Begin the loads and saves of KV blocks that the scheduler requested.

        step_s  duration of the step's computation in seconds
        """
        for order in orders.loads:
            self._wanted[order.request] = len(order.blocks)
            self._loads.start(order)
        for order in orders.saves:
            self._saves.start(order)
        if orders.work != StepWork():
            self._report.work, self._report.step_s = orders.work, step_s

    def take_finished(self) -> FinishedTransfers:
        """Return the requests whose loads or saves have ended since the last call, once each."""
        finished = FinishedTransfers()
        for request, result in self._saves.take_ended().items():
            finished.sent.add(request)
            self.counts.add_nonzero("kv_store_saved_blocks", result.blocks)
            self.counts.add_nonzero("kv_store_lost_calls", result.is_lost)
        for request, result in self._loads.take_ended().items():
            finished.received.add(request)
            self._report.loads[request] = result.seconds
            self.counts.add_nonzero("kv_store_lost_calls", result.is_lost)
            if result.blocks < self._wanted.pop(request):
                # Some were evicted since the lookup, or the store is lost.
                finished.failed.add(request)
                self.counts.add("kv_store_failed_loads")
            else:
                self.counts.add("kv_store_loaded_blocks", result.blocks)
                self.counts.add("kv_store_load_seconds", result.seconds)
        return finished

    def take_report(self) -> StoreReport:
        """Return how long loads from the KV store and engine steps took since the last call."""
        report, self._report = self._report, StoreReport()
        return report

    def close(self) -> None:
        """Wait until nothing reads or writes the engine's memory, and disconnect from the store."""
        self._loads.close()
        self._saves.close()
