"""Runs one discovery source for each pool whose configuration has a section `discover`.

A change of the discovered endpoints is applied like a reload of the configuration. The discovered
endpoints are kept outside the configuration, so a reload does not empty a pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random

from gateway.config import Config
from gateway.config.discovery_sections import Discover
from gateway.fleet.discovery.dns import DnsSource
from gateway.fleet.discovery.file_list import FileSource
from gateway.fleet.discovery.kubernetes import KubernetesSource, pod_service_account
from gateway.fleet.discovery.source_interface import DiscoveredEndpoints, Source

log = logging.getLogger("penstock")

START_WAIT_S = 2.0
"""Maximum seconds that start() waits for the first result of every source, so that the first
request finds endpoints.
"""

AGAIN_S = 10.0
"""Seconds after which a source that raised an unexpected exception is started again."""

SourceFactory = Callable[[Discover, Random], Source]


def create_source(folder: Path, spec: Discover, rng: Random) -> Source:
    """Create the discovery source that a pool's `discover` section names: DNS, file or Kubernetes.

    folder  the folder to which a relative path of a file refers
    spec    section `discover` of the pool
    rng     source of the random jitter between two lookups
    """
    if spec.dns is not None:
        return DnsSource(spec.dns, spec.interval, spec.endpoint, rng)
    if spec.file is not None:
        return FileSource(folder / spec.file, spec.endpoint)
    assert spec.kubernetes is not None
    return KubernetesSource(spec.kubernetes, spec.endpoint, rng, pod_service_account())


class Discovery:
    """Runs the discovery sources of all pools.

    `discovered` maps the name of a pool to the endpoints that its source found last.
    """

    def __init__(
        self,
        found: dict[str, DiscoveredEndpoints],
        apply: Callable[[Callable[[], None]], Awaitable[None]],
        rng: Random,
        create_source: SourceFactory,
    ) -> None:
        """Create a discovery that runs no sources until start() is called.

        found          the dict to store discovered endpoints in, by pool; it becomes `discovered`
        apply          function that is called with another function, which changes `found`; `apply`
                       must call this function. If `apply` raises ValueError, the change is undone
        create_source  function that creates the source for a `discover` section
        """
        self.discovered = found
        self._apply, self._rng, self._create_source = apply, rng, create_source
        self._tasks: dict[str, tuple[Discover, asyncio.Task[None]]] = {}
        self._has_result: dict[str, asyncio.Event] = {}
        self._is_running = False

    async def start(self, config: Config) -> None:
        """Start the discovery sources of all pools.

        Returns when each source has found endpoints once, or after START_WAIT_S seconds.
        """
        self._is_running = True
        self.reconfigure(config)
        waits = [asyncio.create_task(event.wait()) for event in self._has_result.values()]
        if waits:
            await asyncio.wait(waits, timeout=START_WAIT_S)
            for task in waits:
                task.cancel()

    def reconfigure(self, config: Config) -> None:
        """Start the sources that a new configuration adds; stop those that it removes or changes.

        A source whose settings are unchanged keeps running. Before start(), this does nothing.
        """
        if not self._is_running:
            return
        wanted: Mapping[str, Discover] = {
            name: pool.discover for name, pool in config.pools.items() if pool.discover is not None
        }
        for pool in [pool for pool, (spec, _) in self._tasks.items() if wanted.get(pool) != spec]:
            self._tasks.pop(pool)[1].cancel()
        for pool in self.discovered.keys() - wanted.keys():
            del self.discovered[pool]
        for pool, spec in wanted.items():
            if pool not in self._tasks:
                self._has_result[pool] = asyncio.Event()
                task = asyncio.create_task(self._run(pool, spec), name=f"discover {pool}")
                self._tasks[pool] = spec, task

    async def _run(self, pool: str, spec: Discover) -> None:
        while True:
            try:
                async for endpoints in self._create_source(spec, self._rng).watch():
                    await self._store(pool, endpoints)
                    self._has_result[pool].set()
            except Exception:  # the endpoints discovered so far stay, whatever a source does
                log.exception(
                    "service discovery of pool %s failed; the next attempt follows in %.0f s",
                    pool,
                    AGAIN_S,
                )
            await asyncio.sleep(AGAIN_S)

    async def _store(self, pool: str, endpoints: DiscoveredEndpoints) -> None:
        before = self.discovered.get(pool, ())
        if before == endpoints:
            return

        def store() -> None:
            self.discovered[pool] = endpoints

        try:
            await self._apply(store)
        except ValueError:  # a policy may reject the endpoints as well
            self.discovered[pool] = before
            log.exception("service discovery: the endpoints found for pool %s are rejected", pool)
            return
        urls, urls_before = {spec.url for spec in endpoints}, {spec.url for spec in before}
        added, removed = len(urls - urls_before), len(urls_before - urls)
        log.info(
            "service discovery: pool %s has %d discovered endpoints: %d added, %d removed",
            pool,
            len(urls),
            added,
            removed,
        )

    async def stop(self) -> None:
        self._is_running = False
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
