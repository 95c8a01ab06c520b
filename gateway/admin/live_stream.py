"""Takes metric samples on a schedule, and sends a frame of the live view to its watchers.

While none watches, the metrics are sampled every five seconds, so that a new watcher sees the last
minute immediately. live_view.py builds a frame, and live_pages.py serves it over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import monotonic

import msgspec

from gateway.admin.endpoints_page import ROWS_PER_TURN
from gateway.admin.live_fleet_status import FleetStatus
from gateway.admin.live_metric_samples import MetricSample, SampleHistory
from gateway.admin.live_view import build_view
from gateway.util.work_in_turns import run_in_thread, run_in_turns

log = logging.getLogger("penstock")

WATCHED_S = 0.5
UNWATCHED_S = 5.0
MAX_WATCHERS = 16
FRESH_S = 0.25
MAX_CPU_SHARE = 0.02
"""The largest share of the event loop's time (0 to 1) that building frames of the live view may
take.

A frame of 64 endpoints takes 3 ms, one of 256 endpoints 17 ms.
"""

SampleFunction = Callable[[MetricSample | None], Awaitable[tuple[MetricSample, FleetStatus]]]
"""A function from the previous metric sample to a new one and the gateway's status.

It raises LookupError when no process responds.
"""


class LiveStream:
    """Samples the metrics, and builds the frames that all watchers of the live view receive.

    There is one object per admin server; call `start` and `stop` with the server. A frame is the
    whole view as JSON bytes.
    """

    def __init__(self, take_sample: SampleFunction) -> None:
        self._take_sample = take_sample
        self._history = SampleHistory()
        self._appending = asyncio.Lock()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._has_watchers = asyncio.Event()
        self._next: asyncio.Future[bytes] | None = None
        self._frame = b""
        self._framed_at = float("-inf")
        self._build_s = 0.0

    def start(self) -> None:
        """Start a task that samples the gateway's metrics for the live view."""
        self._task = asyncio.create_task(self._run(), name="sample the metrics")

    def stop(self) -> None:
        """Stop sampling the metrics, and cancel the watchers' wait for the next frame."""
        if self._task is not None:
            self._task.cancel()
        if self._next is not None and not self._next.done():
            self._next.cancel()

    def try_add_watcher(self) -> bool:
        """Count a client that begins to watch the live view; return False if there are too many.

        The caller must call remove_watcher() when the client stops watching.
        """
        if self._watchers >= MAX_WATCHERS:
            return False
        self._watchers += 1
        self._has_watchers.set()
        return True

    def remove_watcher(self) -> None:
        self._watchers -= 1

    async def current_frame(self) -> bytes:
        """Return the current frame as JSON bytes, at most a quarter of a second old.

        Raises LookupError if no gateway process responds.
        """
        if monotonic() - self._framed_at > FRESH_S:
            await self._build_frame()
        return self._frame

    async def next_frame(self) -> bytes:
        """Wait for the next frame of the live view, and return it.

        A watcher that is too slow misses frames; it does not delay others.
        """
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    async def _run(self) -> None:
        while True:
            try:
                await self._update()
            except LookupError:
                pass  # a process that did not respond may respond next time
            except Exception:  # one failed frame must not end the stream
                log.exception("building a frame of the live view failed")
            every_s = (
                max(WATCHED_S, self._build_s / MAX_CPU_SHARE) if self._watchers else UNWATCHED_S
            )
            self._has_watchers.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._has_watchers.wait()

    async def _update(self) -> None:
        if not self._watchers:
            sample, _ = await self._take_sample(self._history.newest)
            await self._append(sample)
            return
        await self._build_frame()
        if self._next is not None and not self._next.done():
            self._next.set_result(self._frame)

    async def _encode(self, status: FleetStatus, sample: MetricSample) -> bytes:
        # Return the view as JSON; with many endpoints, a thread builds it.
        if len(status.endpoints) <= ROWS_PER_TURN:
            return _encode_view(status, self._history, sample)
        encode = partial(_encode_view, status, self._history.copy(), sample)
        return await run_in_thread(encode)

    async def _build_frame(self) -> None:
        started_at = monotonic()
        sample, status = await self._take_sample(self._history.newest)
        self._frame = await self._encode(status, sample)
        self._framed_at = sample.at
        await self._append(sample)
        self._build_s = monotonic() - started_at

    async def _append(self, sample: MetricSample) -> None:
        async with self._appending:
            await run_in_turns(self._history.append_steps(sample))


def _encode_view(status: FleetStatus, history: SampleHistory, sample: MetricSample) -> bytes:
    return msgspec.json.encode(build_view(status, history, sample))
