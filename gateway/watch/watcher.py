"""The watcher: asks every endpoint for its health, load and models, and tells the EndpointTable what it heard.

Health, load and models come by aiohttp's client: this is not the path of a request. Losing an engine's metrics changes
nothing but freshness (faults.md F29): policies fall back on the gateway's own bookings.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Awaitable, Callable
from time import monotonic

import aiohttp

from gateway.config import Config
from gateway.endpoints import EndpointTable
from gateway.roster import LiveEndpoint
from gateway.watch import scrape
from kvtransfer.dialects import by_itself
from policies.health import probe_due
from policies.model import Role

log = logging.getLogger("penstock")

METRICS_LIMIT = 4 * 1024 * 1024
MODELS_EVERY_S = 30.0
UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)


class Watcher:
    """Two background tasks per endpoint: looking at it, and looking after its silence. `learnt` is called when an
    engine's list of models has changed. One that leaves is not watched: it will not be asked for anything new."""

    def __init__(self, config: Config, endpoints: EndpointTable, learnt: Callable[[], None]) -> None:
        self._config = config
        self._endpoints = endpoints
        self._learnt = learnt
        self._tasks: dict[LiveEndpoint, tuple[asyncio.Task[None], ...]] = {}
        self._suspected: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Begin watching; returns when every endpoint was asked once, so that the first request meets known ground."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),  # hung engines must not starve others' probes
        )
        await asyncio.gather(*(self._tried(self._look, live) for live in self._endpoints.all()))
        for live in self._endpoints.all():
            self._watch(live)

    def follow(self, config: Config) -> None:
        """Another configuration is in force: newcomers are looked at now, those who leave no more."""
        self._config = config
        if self._session is None:
            return
        for live in self._endpoints.all():
            if live.leaving:
                suspected = self._suspected.get(live)
                for task in (*self._tasks.pop(live, ()), *([] if suspected is None else [suspected])):
                    task.cancel()
            elif live not in self._tasks:
                self._watch(live, at_once=True)

    def _watch(self, live: LiveEndpoint, *, at_once: bool = False) -> None:
        name = live.endpoint.name
        looking = self._repeat(self._look, live, self._look_every_s, at_once=at_once)
        listening = self._repeat(self._listen, live, self._listen_every_s)
        self._tasks[live] = (
            asyncio.create_task(looking, name=f"watch {name}"),
            asyncio.create_task(listening, name=f"listen to {name}"),
        )

    def _look_every_s(self) -> float:
        return min(self._config.health.interval, self._config.scrape.interval)

    def _listen_every_s(self) -> float:
        return self._config.health.progress / 10

    async def stop(self) -> None:
        tasks = [task for pair in self._tasks.values() for task in pair] + list(self._suspected.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _repeat(
        self,
        what: Callable[[LiveEndpoint], Awaitable[None]],
        live: LiveEndpoint,
        every_s: Callable[[], float],
        *,
        at_once: bool = False,
    ) -> None:
        while True:
            if not at_once:
                await asyncio.sleep(every_s() * self._endpoints.rng.uniform(0.9, 1.1))
            at_once = False
            await self._tried(what, live)

    async def _tried(self, what: Callable[[LiveEndpoint], Awaitable[None]], live: LiveEndpoint) -> None:
        """Whatever an engine's words bring about, the others are watched."""
        try:
            await what(live)
        except Exception:
            log.exception("watching %s failed", live.endpoint.name)

    def suspect(self, live: LiveEndpoint) -> None:
        """Somebody else found the endpoint broken: see for ourselves at once, once at a time."""
        if self._session is not None and live not in self._suspected:
            task = asyncio.create_task(self._probe(live), name=f"see whether {live.endpoint.name} is well")
            self._suspected[live] = task
            task.add_done_callback(lambda _: self._suspected.pop(live, None))

    async def _look(self, live: LiveEndpoint) -> None:
        await asyncio.gather(self._probe(live), self._scrape(live), self._list_models(live))

    async def _probe(self, live: LiveEndpoint) -> None:
        status, timeout_s = None, self._config.health.timeout
        try:
            status, _ = await self._fetch(live, self._config.health.path, timeout_s, 4096)
        except UNREACHABLE as error:
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
                self._endpoints.refused(live)
        if status == 200 and live.stalled and probe_due(live.health, monotonic()):
            if await self._generates(live, timeout_s):
                self._endpoints.progressed(live)
            else:
                status = None
        self._endpoints.probed(live, status)

    async def _listen(self, live: LiveEndpoint) -> None:
        """An endpoint silent for half its patience is asked for one token of its own; without it, it is wedged."""
        patience_s = self._endpoints.patience_s(live)
        silence_s = live.upstream.silence_s(monotonic())
        if silence_s < patience_s / 2 or not live.load.available:
            return
        if await self._generates(live, max(self._config.health.timeout, patience_s - silence_s)):
            self._endpoints.progressed(live)
        elif live.upstream.silence_s(monotonic()) > silence_s:  # nobody else heard from it meanwhile
            log.warning("endpoint %s has been silent for %.1f s", live.endpoint.name, patience_s)
            self._endpoints.wedged(live)

    async def _generates(self, live: LiveEndpoint, timeout_s: float) -> bool:
        """Whether the engine gives one token in time. A 4xx proves nothing about it, and so nothing against it."""
        model = live.endpoint.served_model or next(iter(live.models), None)
        if model is None:
            return True
        canary: dict[str, str | int] = {"model": model, "prompt": "1", "max_tokens": 1}
        if live.endpoint.role is not Role.BOTH:
            canary |= by_itself(live.endpoint.engine)
        try:
            status, _ = await self._fetch(live, "/v1/completions", timeout_s, METRICS_LIMIT, canary)
        except UNREACHABLE:
            return False
        return status < 500

    async def _scrape(self, live: LiveEndpoint) -> None:
        path = scrape.PATHS[live.endpoint.engine]
        status, text = await self._get(live, path, self._config.scrape.timeout)
        if status == 200:
            self._endpoints.scraped(live, scrape.read(text, live.endpoint.engine))

    async def _list_models(self, live: LiveEndpoint) -> None:
        if live.models_at is not None and monotonic() - live.models_at < MODELS_EVERY_S:
            return
        status, text = await self._get(live, "/v1/models", self._config.health.timeout)
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

    async def _get(self, live: LiveEndpoint, path: str, timeout_s: float) -> tuple[int | None, bytes]:
        """Status and body; None when the engine did not answer in time."""
        try:
            return await self._fetch(live, path, timeout_s, METRICS_LIMIT)
        except UNREACHABLE:
            return None, b""

    async def _fetch(
        self, live: LiveEndpoint, path: str, timeout_s: float, limit: int, json_body: object = None
    ) -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST if there is something to send. Raises one of UNREACHABLE."""
        try:
            return await self._read(live, path, timeout_s, limit, json_body)
        except UNREACHABLE as error:
            _forget_frames(error)
            raise

    async def _read(
        self, live: LiveEndpoint, path: str, timeout_s: float, limit: int, json_body: object
    ) -> tuple[int, bytes]:
        assert self._session is not None
        url, method = live.endpoint.url + path, "GET" if json_body is None else "POST"
        async with (
            asyncio.timeout(timeout_s),
            self._session.request(method, url, headers=live.key_header, json=json_body) as answer,
        ):
            body = bytearray()
            async for piece in answer.content.iter_any():  # read(limit) would return what happens to be there
                body += piece
                if len(body) >= limit:
                    break
            return answer.status, bytes(body[:limit])


def _forget_frames(error: BaseException) -> None:
    """What it came through: frames of libraries that hold the error are held by it, and a dead engine is probed each
    second; only the collector would end that."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
