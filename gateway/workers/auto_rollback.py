"""`reload.auto_rollback` with workers: the requests of all of them are judged, and all go back together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from gateway.config import AutoRollback
from gateway.reload.auto_rollback import Tally
from gateway.reload.reloader import ChangeOptions
from gateway.workers.config_rollout import Configured, message_of, result_of
from gateway.workers.worker_process import LOST, Worker

ASK_S = 5.0


class WorkersOnTrial:
    """All workers as the target of one trial.

    The last tally of a worker stays counted when it ends or does not answer, so totals never fall.
    """

    def __init__(self, configured: Configured, workers: Callable[[], Sequence[Worker]]) -> None:
        self._configured = configured
        self._workers = workers
        self._last: dict[Worker, Tally] = {}
        self._ended = Tally()

    @property
    def limits(self) -> AutoRollback | None:
        return self._configured.running.config.reload.auto_rollback

    @property
    def version(self) -> int:
        return self._configured.version

    async def tally(self) -> Tally:
        """Requests of all workers since the start, those of ended workers included."""
        workers = self._workers()
        answers = await asyncio.gather(*map(_ask, workers))
        self._last |= {worker: found for worker, found in zip(workers, answers, strict=True) if found is not None}
        for worker in self._last.keys() - {*self._workers()}:
            self._ended = self._ended.plus(self._last.pop(worker))
        total = self._ended
        for each in self._last.values():
            total = total.plus(each)
        return total

    async def roll_back(self) -> tuple[str, str]:
        """(result, message) of going back to the version before."""
        answer = await self._configured.rollback(None, ChangeOptions(force=True))
        return result_of(answer), message_of(answer)


async def _ask(worker: Worker) -> Tally | None:
    try:
        answer = await worker.ask("GET", "/config/tally", timeout_s=ASK_S)
    except LOST:
        return None
    if answer.status != 200:
        return None
    found = json.loads(answer.body)
    return Tally(found["ended"], found["failed"])
