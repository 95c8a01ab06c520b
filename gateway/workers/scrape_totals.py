"""Merges the metrics of all workers into one scrape, with totals that never fall.

A total that fell would look like a counter reset. The module therefore keeps the last values of
every worker that does not respond, and the counters of workers that have ended. page_merge.py
merges metric families, exposition.py renders them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.metrics.exposition import render_page
from gateway.metrics.metric_types import FamilyReading
from gateway.workers import page_merge
from gateway.workers.worker_process import REQUEST_ERRORS, Worker

SCRAPE_S = 5.0
PATH = "/metrics/readings"

Readings = Sequence[FamilyReading]
_decoder = msgspec.msgpack.Decoder(list[FamilyReading])


class CounterTotals:
    """The metrics of the `serving` workers, and the counters of the `ending` workers, which finish
    their last requests.
    """

    def __init__(
        self, serving: Callable[[], Sequence[Worker]], ending: Callable[[], Sequence[Worker]]
    ) -> None:
        self._serving, self._ending = serving, ending
        self._last: dict[Worker, Readings] = {}
        self._ended: Readings = ()
        self._one_at_a_time = asyncio.Lock()

    async def render_page(
        self,
        own: Callable[[Mapping[int, Readings]], Readings] = lambda _: (),
        *,
        exemplars: bool = False,
    ) -> bytes:
        """Return the text of a metrics scrape, including the supervisor's own metric families.

        `own` returns them, given the families of each serving worker by its number. Concurrent
        scrapes run one after the other.
        """
        async with self._one_at_a_time:
            workers = [*self._serving(), *self._ending()]
            answers = await asyncio.gather(
                *(_scrape(worker, exemplars=exemplars) for worker in workers)
            )
            fresh = {
                worker: families
                for worker, families in zip(workers, answers, strict=True)
                if families is not None
            }
            self._last |= fresh
            serving = self._serving()
            ended = [
                self._last.pop(worker) for worker in self._last.keys() - {*serving, *self._ending()}
            ]
            if ended:
                self._ended = await asyncio.to_thread(
                    _merge_ended, [self._ended, *ended], [*fresh.values()]
                )
            now = [fresh[worker] for worker in serving if worker in fresh]
            mine = own({worker.number: fresh[worker] for worker in serving if worker in fresh})
            counters_only = [
                families
                for worker, families in self._last.items()
                if worker not in serving or worker not in fresh
            ]
            return await asyncio.to_thread(
                _render, [*now, mine], [self._ended, *counters_only], exemplars
            )


def _merge_ended(ended: Sequence[Readings], fresh: Sequence[Readings]) -> Readings:
    total = page_merge.merge_families((), ended)
    return page_merge.without_removed_endpoints(total, fresh)


def _render(now: Sequence[Readings], ended: Sequence[Readings], exemplars: bool) -> bytes:
    return render_page(page_merge.merge_families(now, ended), exemplars=exemplars)


async def _scrape(worker: Worker, *, exemplars: bool) -> Readings | None:
    try:
        response = await worker.request(
            "GET", f"{PATH}?exemplars" if exemplars else PATH, timeout_s=SCRAPE_S
        )
        return _decoder.decode(response.body) if response.status == 200 else None
    except (*REQUEST_ERRORS, msgspec.DecodeError):
        return None
