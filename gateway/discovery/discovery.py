"""One source per pool that has one, followed while the configuration has it; what it finds goes the way of a reload.

Owner of who was found. Live: it outlives configurations, so a reload does not begin with an empty pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from gateway.config import Config
from gateway.config.tree import Discover
from gateway.discovery.dns import Dns
from gateway.discovery.kubernetes import Slices, mounted
from gateway.discovery.listed import Listed
from gateway.discovery.source import Found, Source

log = logging.getLogger("penstock")

PATIENCE_S = 2.0
"""How long a start waits for the first word of every source: the first request then meets endpoints."""

AGAIN_S = 10.0
"""Between the failure of a source, of something that it was told and could not understand, and its next try."""

Make = Callable[[Discover, Random], Source]


def made(folder: Path, spec: Discover, rng: Random) -> Source:
    """The source that a configuration names; its relative path starts from `folder`."""
    if spec.dns is not None:
        return Dns(spec.dns, spec.interval, spec.endpoint, rng)
    if spec.file is not None:
        return Listed(folder / spec.file, spec.endpoint)
    assert spec.kubernetes is not None
    return Slices(spec.kubernetes, spec.endpoint, rng, mounted())


class Discovery:
    """`found` by pool, as the endpoint table reads it. `changed` is called when it has."""

    def __init__(self, found: dict[str, Found], changed: Callable[[], None], rng: Random, make: Make) -> None:
        self.found = found
        self._changed, self._rng, self._make = changed, rng, make
        self._tasks: dict[str, tuple[Discover, asyncio.Task[None]]] = {}
        self._first: dict[str, asyncio.Event] = {}
        self._on = False

    async def start(self, config: Config) -> None:
        """Begin; returns when everybody has said something, or has had time to."""
        self._on = True
        self.follow(config)
        waiting = [asyncio.create_task(each.wait()) for each in self._first.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=PATIENCE_S)
            for task in waiting:
                task.cancel()

    def follow(self, config: Config) -> None:
        """Sources as this configuration has them. One that is as it was goes on."""
        if not self._on:
            return
        wanted: Mapping[str, Discover] = {
            name: pool.discover for name, pool in config.pools.items() if pool.discover is not None
        }
        for pool in [pool for pool, (spec, _) in self._tasks.items() if wanted.get(pool) != spec]:
            self._tasks.pop(pool)[1].cancel()
        for pool in self.found.keys() - wanted.keys():
            del self.found[pool]
        for pool, spec in wanted.items():
            if pool not in self._tasks:
                self._first[pool] = asyncio.Event()
                task = asyncio.create_task(self._run(pool, spec), name=f"discover {pool}")
                self._tasks[pool] = spec, task

    async def _run(self, pool: str, spec: Discover) -> None:
        while True:
            try:
                async for found in self._make(spec, self._rng).watch():
                    self._take(pool, found)
                    self._first[pool].set()
            except Exception:  # whatever a source does, who was found stays
                log.exception("discovering pool %s failed; beginning anew in %.0f s", pool, AGAIN_S)
            await asyncio.sleep(AGAIN_S)

    def _take(self, pool: str, found: Found) -> None:
        before = self.found.get(pool, ())
        if before == found:
            return
        self.found[pool] = found
        try:
            self._changed()
        except ValueError:  # as everything that cannot be put in force, a policy's complaint included
            self.found[pool] = before
            log.exception("what was discovered of pool %s is not taken over", pool)
            return
        urls, were = {each.url for each in found}, {each.url for each in before}
        log.info("pool %s: %d found, %d came, %d left", pool, len(urls), len(urls - were), len(were - urls))

    async def stop(self) -> None:
        self._on = False
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
