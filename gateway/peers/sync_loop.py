"""The two tasks that send and receive frames over the bus between gateways.

Received frames wait in a bounded queue. They are handled in slices of a millisecond, so that
streams to clients are not delayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from random import Random
from time import monotonic, perf_counter

from gateway.metrics.catalogue import Metrics
from gateway.peers.bus_interface import FRAME_CAP_BYTES, Bus
from gateway.peers.state_exchange import PeerView

log = logging.getLogger("penstock")

INBOX_CAP_BYTES = 16 << 20
SLICE_S = 0.001
WARM_UP_BACKLOG_BYTES = 1 << 20  # the frames for a newcomer wait while the bus's backlog is larger
CONNECT_WITHIN_S = 1.0
WARM_WITHIN_S = 5.0


class SyncLoop:
    """Moves frames between a PeerView and a bus.

    Updates are collected for `flush_s` seconds and sent together.
    """

    def __init__(
        self, view: PeerView, bus: Bus, flush_s: float, metrics: Metrics, rng: Random
    ) -> None:
        self._view = view
        self._bus = bus
        self._flush_s = flush_s
        self._rng = rng
        self._inbox: deque[tuple[bytes, float]] = deque()
        self._inbox_bytes = 0
        self._has_frames = asyncio.Event()
        self._is_warm = asyncio.Event()
        self._is_connected = asyncio.Event()
        self._gaps = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._warm_up_tasks: set[asyncio.Task[None]] = set()
        metrics.shared_up.set_function(lambda: float(bus.state(monotonic()).connected))
        metrics.shared_staleness_seconds.set_function(lambda: bus.state(monotonic()).staleness_s)
        metrics.shared_peers.set_function(lambda: float(len(view.peers)))

    async def start(self) -> None:
        """Connect to the message bus between gateways.

        Returns once this gateway has the state of the others, or has found no others.
        """
        self._view.start(monotonic())
        await self._bus.start(self._view.own_id, self.receive)
        self._tasks = [
            asyncio.create_task(self._send_loop(), name="send to other gateways"),
            asyncio.create_task(self._receive_loop(), name="receive from other gateways"),
        ]
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await self._is_connected.wait()
            async with asyncio.timeout(WARM_WITHIN_S):
                await self._is_warm.wait()
        except TimeoutError:
            log.warning(
                "shared state: no other gateway answered; this one starts with an empty state"
            )

    async def stop(self) -> None:
        for task in (*self._tasks, *self._warm_up_tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._warm_up_tasks, return_exceptions=True)
        self._flush()
        to, frame = self._view.bye_frame()
        self._bus.publish(frame, to)
        await self._bus.stop()

    def state(self) -> dict[str, object]:
        """Return the state of the bus and the number of other gateways, for display."""
        state = self._bus.state(monotonic())
        return {
            "connected": state.connected,
            "problem": state.problem,
            "stale_s": round(state.staleness_s, 1),
            "gateways": len(self._view.peers),
        }

    def receive(self, frame: bytes, age_s: float) -> None:
        """Queue a frame from another gateway. If the queue is full, drop the oldest frames."""
        if len(frame) > FRAME_CAP_BYTES:
            self._view.count_drop("too_long")
            return
        self._inbox.append((frame, monotonic() - age_s))
        self._inbox_bytes += len(frame)
        while self._inbox_bytes > INBOX_CAP_BYTES:
            self._inbox_bytes -= len(self._inbox.popleft()[0])
            self._view.count_drop("inbox")
        self._has_frames.set()

    async def _send_loop(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s * self._rng.uniform(0.8, 1.2))
            try:
                self._flush()
                now = monotonic()
                self._view.expire_peers(now)
                await self._run_in_slices(self._view.finish_warm_up(now))
                self._check_warm_up()
            except Exception:
                log.exception("shared state: sending to other gateways failed")

    def _flush(self) -> None:
        now = monotonic()
        state = self._bus.state(now)
        if state.connected:
            self._is_connected.set()
        if state.gaps > self._gaps:
            self._gaps = state.gaps
            self._view.warm_up.restart()
        for to, frame in self._view.outgoing_frames(now, is_connected=state.connected):
            self._bus.publish(frame, to)

    def _check_warm_up(self) -> None:
        warm_up = self._view.warm_up
        if warm_up.is_warm and not self._is_warm.is_set():
            self._is_warm.set()
            count = len(self._view.peers)
            log.warning(
                "shared state: received from other gateways in %.2f s: %d messages; %d other %s",
                warm_up.took_s,
                warm_up.received_messages,
                count,
                "gateway" if count == 1 else "gateways",
            )
        new_peers, self._view.new_peers = self._view.new_peers, []
        for new_peer in dict.fromkeys(new_peers):
            task = asyncio.create_task(self._warm_up(new_peer), name="warm up a gateway")
            self._warm_up_tasks.add(task)
            task.add_done_callback(self._warm_up_tasks.discard)

    async def _warm_up(self, new_peer: bytes) -> None:
        for to, frame in self._view.warm_up_frames(new_peer, monotonic()):
            # A bus has no event for a shrinking backlog.
            while self._bus.state(monotonic()).backlog_bytes > WARM_UP_BACKLOG_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            self._bus.publish(frame, to)
            await asyncio.sleep(0)

    async def _receive_loop(self) -> None:
        while True:
            await self._has_frames.wait()
            self._has_frames.clear()
            while self._inbox:
                frame, sent_at = self._inbox.popleft()
                self._inbox_bytes -= len(frame)
                now = monotonic()
                try:
                    await self._run_in_slices(self._view.apply_frame(frame, now - sent_at, now))
                except Exception:
                    log.exception(
                        "shared state: a frame from another gateway could not be processed"
                    )

    async def _run_in_slices(self, steps: Iterator[None]) -> None:
        began = perf_counter()
        for _ in steps:
            if perf_counter() - began > SLICE_S:
                await asyncio.sleep(0)
                began = perf_counter()
