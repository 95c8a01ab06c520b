"""What all workers ever counted, as one page for a scrape: a sum that fell would look like a start from nothing.

Remembers the last page of every worker, for one who does not answer just now, and what those had counted who are gone.
Not here: how pages become one (merge.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from gateway.meters import Merge
from gateway.workers import merge
from gateway.workers.process import LOST, Worker

SCRAPE_S = 5.0


class Counted:
    """Of the workers who are `serving` everything, of those who are `ending` what they have only counts."""

    def __init__(
        self,
        serving: Callable[[], Sequence[Worker]],
        ending: Callable[[], Sequence[Worker]],
        rules: Mapping[str, Merge],
    ) -> None:
        self._serving, self._ending = serving, ending
        self._rules = rules
        self._last: dict[Worker, str] = {}
        self._gone = ""
        self._one_at_a_time = asyncio.Lock()

    async def page(self, own: str = "") -> str:
        """As of now, with the supervisor's `own` page. One scrape at a time."""
        async with self._one_at_a_time:
            workers = [*self._serving(), *self._ending()]
            told = zip(workers, await asyncio.gather(*map(_scraped, workers)), strict=True)
            fresh = {worker: page for worker, page in told if page is not None}
            self._last |= fresh
            serving = self._serving()
            gone = [self._last.pop(worker) for worker in self._last.keys() - {*serving, *self._ending()}]
            if gone:
                self._gone = await asyncio.to_thread(merge.metrics, [], {}, [self._gone, *gone])
            now = [fresh[worker] for worker in serving if worker in fresh]
            rest = [page for worker, page in self._last.items() if worker not in serving or worker not in fresh]
            return await asyncio.to_thread(merge.metrics, [*now, own], self._rules, [self._gone, *rest])


async def _scraped(worker: Worker) -> str | None:
    try:
        answer = await worker.ask("GET", "/metrics", timeout_s=SCRAPE_S)
    except LOST:
        return None
    return answer.body.decode() if answer.status == 200 else None
