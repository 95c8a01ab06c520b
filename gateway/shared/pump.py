"""The pump: when things are told and heard. Two tasks beside the requests, which never wait for either.

What comes in waits in a bounded queue and is worked off a millisecond at a time, so that streams go on in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from random import Random
from time import monotonic, perf_counter

from gateway.metrics import Metrics
from gateway.shared.bus import FRAME_CAP_BYTES, Bus
from gateway.shared.view import View

log = logging.getLogger("penstock")

INBOX_CAP_BYTES = 16 << 20
SLICE_S = 0.001
ROOM_BYTES = 1 << 20  # a snapshot waits while more than this is to be sent
CONNECT_WITHIN_S = 1.0
WARM_WITHIN_S = 5.0


class Pump:
    """Moves between a view and a bus. `flush_s`: how long things wait to be told together."""

    def __init__(self, view: View, bus: Bus, flush_s: float, metrics: Metrics, rng: Random) -> None:
        self._view = view
        self._bus = bus
        self._flush_s = flush_s
        self._rng = rng
        self._inbox: deque[tuple[bytes, float]] = deque()
        self._inbox_bytes = 0
        self._news = asyncio.Event()
        self._warm = asyncio.Event()
        self._connected = asyncio.Event()
        self._gaps = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        metrics.shared_up.follow(lambda: float(bus.state(monotonic()).connected))
        metrics.shared_staleness_seconds.follow(lambda: bus.state(monotonic()).staleness_s)
        metrics.shared_peers.follow(lambda: float(len(view.peers)))

    async def start(self) -> None:
        """Returns when this gateway knows what the others know, or when nobody is there to tell it."""
        self._view.begin(monotonic())
        await self._bus.start(self._view.me, self.hear)
        self._tasks = [
            asyncio.create_task(self._beat(), name="tell what happened"),
            asyncio.create_task(self._work_off(), name="take what was told"),
        ]
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await self._connected.wait()
            async with asyncio.timeout(WARM_WITHIN_S):
                await self._warm.wait()
        except TimeoutError:
            log.warning("shared view: nobody could be asked; beginning with what is known here: nothing")

    async def stop(self) -> None:
        for task in (*self._tasks, *self._telling):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._telling, return_exceptions=True)
        self._tell()
        to, frame = self._view.bye()
        self._bus.publish(frame, to)
        await self._bus.stop()

    def state(self) -> dict[str, object]:
        """For operators: whether other gateways are reached, why not, and how many there are."""
        state = self._bus.state(monotonic())
        return {
            "connected": state.connected,
            "problem": state.problem,
            "stale_s": round(state.staleness_s, 1),
            "gateways": len(self._view.peers),
        }

    def hear(self, frame: bytes, age_s: float) -> None:
        """Put a frame in the queue; the oldest is given up when there is no room."""
        if len(frame) > FRAME_CAP_BYTES:
            self._view.drop("too_long")
            return
        self._inbox.append((frame, monotonic() - age_s))
        self._inbox_bytes += len(frame)
        while self._inbox_bytes > INBOX_CAP_BYTES:
            self._inbox_bytes -= len(self._inbox.popleft()[0])
            self._view.drop("inbox")
        self._news.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s * self._rng.uniform(0.8, 1.2))
            try:
                self._tell()
                now = monotonic()
                self._view.sweep(now)
                await self._slowly(self._view.settle(now))
                self._look(now)
            except Exception:
                log.exception("telling other gateways failed")

    def _tell(self) -> None:
        now = monotonic()
        state = self._bus.state(now)
        if state.connected:
            self._connected.set()
        if state.gaps > self._gaps:
            self._gaps = state.gaps
            self._view.warming.again()
        for to, frame in self._view.flush(now, connected=state.connected):
            self._bus.publish(frame, to)

    def _look(self, now: float) -> None:
        """Say once that we are warm, and begin to tell whoever asked."""
        warming = self._view.warming
        if warming.warm and not self._warm.is_set():
            self._warm.set()
            others = f"{len(self._view.peers)} other gateways" if len(self._view.peers) != 1 else "1 other gateway"
            log.warning("shared view: warm in %.2f s: %d messages, %s", warming.took_s, warming.told, others)
        askers, self._view.askers = self._view.askers, []
        for asker in dict.fromkeys(askers):
            task = asyncio.create_task(self._tell_all(asker), name="tell a newcomer")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_all(self, asker: bytes) -> None:
        for to, frame in self._view.parts(asker, monotonic()):
            while self._bus.state(monotonic()).backlog_bytes > ROOM_BYTES:  # noqa: ASYNC110 - a bus tells nobody
                await asyncio.sleep(0.005)
            self._bus.publish(frame, to)
            await asyncio.sleep(0)

    async def _work_off(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._inbox:
                frame, said_at = self._inbox.popleft()
                self._inbox_bytes -= len(frame)
                now = monotonic()
                try:
                    await self._slowly(self._view.take(frame, now - said_at, now))
                except Exception:
                    log.exception("a frame of another gateway could not be taken")

    async def _slowly(self, steps: Iterator[None]) -> None:
        began = perf_counter()
        for _ in steps:
            if perf_counter() - began > SLICE_S:
                await asyncio.sleep(0)
                began = perf_counter()
