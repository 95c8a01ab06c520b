"""Collects the records of ended requests from all workers, for one monitor of workload drift.

Each worker sees only a part of every conversation. Therefore the counts of one monitor per worker
could not be added up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import time

import msgspec

from gateway.admin.drift_pages import RECORDS_PATH, decode_records
from gateway.drift.drift_monitor import DriftMonitor
from gateway.telemetry.drift_records import ShapeRecord
from gateway.workers.worker_process import REQUEST_ERRORS, Worker

log = logging.getLogger("penstock")

COLLECT_S = 1.0
TIMEOUT_S = 5.0


class DriftCollector:
    """Passes the records of ended requests of all `workers` to one drift monitor, once per second.

    The monitor compares the requests with the workload that a pool was sized for.
    """

    def __init__(self, monitor: DriftMonitor, workers: Callable[[], Sequence[Worker]]) -> None:
        self._monitor, self._workers = monitor, workers
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="watch for drift")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_S)
            if self._monitor.is_watching:
                try:
                    await self.collect(time())
                except Exception:  # an error must not end the loop
                    log.exception("the detection of drift failed")

    async def collect(self, now_s: float) -> None:
        """Collect the new records of all workers, and compare the time windows that have ended."""
        answers = await asyncio.gather(*map(_fetch, self._workers()))
        records = [record for answer in answers for record in answer]
        self._monitor.feed(sorted(records, key=lambda record: record.at_s))
        self._monitor.advance(now_s)


async def _fetch(worker: Worker) -> list[ShapeRecord]:
    try:
        response = await worker.request("GET", RECORDS_PATH, timeout_s=TIMEOUT_S)
        return decode_records(response.body) if response.status == 200 else []
    except (*REQUEST_ERRORS, msgspec.DecodeError):
        return []
