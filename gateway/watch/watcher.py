"""The watcher: asks every endpoint for its health, load and models, and tells the EndpointTable what it heard.

Health, load and models come by aiohttp's client: this is not the path of a request. Losing an engine's metrics changes
nothing but freshness (faults.md F29): policies fall back on the gateway's own bookings.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from time import monotonic

import aiohttp

from gateway.config import Config
from gateway.endpoints import EndpointTable, LiveEndpoint
from gateway.watch import scrape

log = logging.getLogger("penstock")

METRICS_LIMIT = 4 * 1024 * 1024
MODELS_EVERY_S = 30.0


class Watcher:
    """One background task per endpoint. `learnt` is called when an engine's list of models has changed."""

    def __init__(self, config: Config, endpoints: EndpointTable, learnt: Callable[[], None]) -> None:
        self._config = config
        self._endpoints = endpoints
        self._learnt = learnt
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Begin watching; returns when every endpoint was asked once, so that the first request meets known ground."""
        longest = max(self._config.health.timeout, self._config.scrape.timeout)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=longest))
        await asyncio.gather(*(self._look(live) for live in self._endpoints.all()))
        for live in self._endpoints.all():
            self._tasks.append(asyncio.create_task(self._watch(live), name=f"watch {live.endpoint.name}"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _watch(self, live: LiveEndpoint) -> None:
        interval = min(self._config.health.interval, self._config.scrape.interval)
        while True:
            await asyncio.sleep(interval * self._endpoints.rng.uniform(0.9, 1.1))
            try:
                await self._look(live)
            except Exception:
                log.exception("watching %s failed", live.endpoint.name)

    async def _look(self, live: LiveEndpoint) -> None:
        await asyncio.gather(self._probe(live), self._scrape(live), self._list_models(live))

    async def _probe(self, live: LiveEndpoint) -> None:
        status, _ = await self._get(live, self._config.health.path, self._config.health.timeout, 4096)
        self._endpoints.probed(live, status)

    async def _scrape(self, live: LiveEndpoint) -> None:
        path = scrape.PATHS[live.endpoint.engine]
        status, text = await self._get(live, path, self._config.scrape.timeout, METRICS_LIMIT)
        if status == 200:
            self._endpoints.scraped(live, scrape.read(text, live.endpoint.engine))

    async def _list_models(self, live: LiveEndpoint) -> None:
        if live.models_at is not None and monotonic() - live.models_at < MODELS_EVERY_S:
            return
        status, text = await self._get(live, "/v1/models", self._config.health.timeout, METRICS_LIMIT)
        if status != 200:
            return
        try:
            names = tuple(str(entry["id"]) for entry in json.loads(text)["data"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        live.models_at = monotonic()
        if names != live.models:
            live.models = names
            self._learnt()

    async def _get(self, live: LiveEndpoint, path: str, timeout_s: float, limit: int) -> tuple[int | None, bytes]:
        """Status and body; None when the engine did not answer in time."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(live.endpoint.url + path, headers=live.key_header) as answer,
            ):
                return answer.status, await answer.content.read(limit)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None, b""
