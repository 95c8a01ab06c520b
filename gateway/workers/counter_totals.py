"""What all workers ever counted, as one page for a scrape: a sum that fell would look like a start from nothing.

Remembers the last readings of every worker: for one that does not answer just now, and of those that are gone what they
had counted. Not here: how readings are merged (gateway/workers/metrics_merge.py) and written (gateway/metrics/exposition.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from gateway.metrics.exposition import page
from gateway.metrics.metric_types import Reading
from gateway.workers import metrics_merge
from gateway.workers.worker_process import LOST, Worker

SCRAPE_S = 5.0
PATH = "/metrics/readings"

Readings = Sequence[Reading]
_decoder = msgspec.msgpack.Decoder(list[Reading])


class Counted:
    """Everything of the workers that are `serving`, and counters of those that are `ending` their connections."""

    def __init__(self, serving: Callable[[], Sequence[Worker]], ending: Callable[[], Sequence[Worker]]) -> None:
        self._serving, self._ending = serving, ending
        self._last: dict[Worker, Readings] = {}
        self._gone: Readings = ()
        self._one_at_a_time = asyncio.Lock()

    async def page(self, own: Readings = (), *, exemplars: bool = False) -> bytes:
        """The text of a scrape as of now, with the supervisor's `own` readings. One scrape at a time."""
        async with self._one_at_a_time:
            workers = [*self._serving(), *self._ending()]
            answers = await asyncio.gather(*(_scraped(each, exemplars=exemplars) for each in workers))
            fresh = {worker: found for worker, found in zip(workers, answers, strict=True) if found is not None}
            self._last |= fresh
            serving = self._serving()
            gone = [self._last.pop(worker) for worker in self._last.keys() - {*serving, *self._ending()}]
            if gone:
                self._gone = await asyncio.to_thread(metrics_merge.readings, (), [self._gone, *gone])
            now = [fresh[worker] for worker in serving if worker in fresh]
            rest = [found for worker, found in self._last.items() if worker not in serving or worker not in fresh]
            return await asyncio.to_thread(_written, [*now, own], [self._gone, *rest], exemplars)


def _written(now: Sequence[Readings], gone: Sequence[Readings], exemplars: bool) -> bytes:
    return page(metrics_merge.readings(now, gone), exemplars=exemplars)


async def _scraped(worker: Worker, *, exemplars: bool) -> Readings | None:
    try:
        answer = await worker.ask("GET", f"{PATH}?exemplars" if exemplars else PATH, timeout_s=SCRAPE_S)
        return _decoder.decode(answer.body) if answer.status == 200 else None
    except (*LOST, msgspec.DecodeError):
        return None
