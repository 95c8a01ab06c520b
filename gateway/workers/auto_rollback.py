"""Auto-rollback (`reload.auto_rollback`) with several workers.

If the requests of all workers together fail more often with a new configuration version, all of
them roll back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from gateway.config import AutoRollback
from gateway.reload.auto_rollback import FailureCount
from gateway.reload.reloader import ChangeOptions
from gateway.workers.config_rollout import ConfigRollout, response_message, response_result
from gateway.workers.worker_process import REQUEST_ERRORS, Worker

TIMEOUT_S = 5.0


class WorkersRollbackTarget:
    """Lets auto-rollback count failures in all workers together, and undo changes in all of them.

    If a worker has ended or does not respond, its last count is used, so that totals never fall.
    """

    def __init__(self, configured: ConfigRollout, workers: Callable[[], Sequence[Worker]]) -> None:
        self._configured = configured
        self._workers = workers
        self._last: dict[Worker, FailureCount] = {}
        self._ended = FailureCount()

    @property
    def limits(self) -> AutoRollback | None:
        """Return the current settings of auto-rollback; None if it is off."""
        return self._configured.running.config.reload.auto_rollback

    @property
    def version(self) -> int:
        return self._configured.version

    async def failure_count(self) -> FailureCount:
        """Return the failure count of all workers since the start, including ended workers."""
        workers = self._workers()
        answers = await asyncio.gather(*map(_fetch_count, workers))
        self._last |= {
            worker: count
            for worker, count in zip(workers, answers, strict=True)
            if count is not None
        }
        for worker in self._last.keys() - {*self._workers()}:
            self._ended = self._ended.plus(self._last.pop(worker))
        total = self._ended
        for count in self._last.values():
            total = total.plus(count)
        return total

    async def roll_back(self) -> tuple[str, str]:
        """Make all workers return to the previous configuration version.

        Returns (result, message): the result is "applied" on success, else for example "rejected";
        the message says what happened, for the operator.
        """
        response = await self._configured.rollback(None, ChangeOptions(force=True))
        return response_result(response), response_message(response)


async def _fetch_count(worker: Worker) -> FailureCount | None:
    try:
        response = await worker.request("GET", "/config/tally", timeout_s=TIMEOUT_S)
    except REQUEST_ERRORS:
        return None
    if response.status != 200:
        return None
    count = json.loads(response.body)
    return FailureCount(count["ended"], count["failed"])
