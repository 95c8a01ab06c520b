"""The watcher: asks every endpoint for its health, load and models, and tells the EndpointTable what it heard.

Health, load and models come by aiohttp's client: this is not the path of a request. Losing an engine's metrics changes
nothing but freshness (faults.md F29): policies fall back on the gateway's own bookings.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from gateway.config import Config
from gateway.endpoints import OUT, EndpointTable
from gateway.roster import LiveEndpoint
from gateway.upstream import is_own_error
from gateway.watch import scrape
from kvtransfer.dialects import by_itself
from policies.health import Event, probe_due
from policies.model import Role
from policies.speed_record import Measure, Slowness

log = logging.getLogger("penstock")

METRICS_LIMIT = 4 * 1024 * 1024
MODELS_EVERY_S = 30.0
RECOVERY_S = 1.0  # an endpoint that is out is probed so often at least, whatever its back-off
CHECK_S = 0.5  # for a health check that a request waits for
NO_LIST = (404, 405, 501)  # the engine has no /v1/models
CONNECTION_LOST = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)


class PaceProbe(msgspec.Struct, frozen=True):
    """A piece of work to time: random words that no cache holds, and tokens to generate."""

    words: int
    tokens: int


PROMPT_WORK, DECODE_WORK = PaceProbe(1000, 1), PaceProbe(1, 16)
PACE_TIMEOUT_S = 30.0
CLEAR_RATIO, LEAST_EXCESS_S = 1.6, 0.02
LEAST_GROWS = 1.05
CONFIRMED = 3  # comparisons in a row that an endpoint must pass: a peer may be busy in one of them


def is_out_as_slow(live: LiveEndpoint) -> bool:
    """Whether it was ejected because it was slow, so that its /health says nothing of why."""
    return live.health.cause is Event.SLOW and live.speed.slowness is not None


class Watcher:
    """Two background tasks per endpoint: looking at it, and looking after its silence. `learnt` is called when an
    engine's list of models has changed. One that leaves is not watched: it will not be asked for anything new."""

    def __init__(self, config: Config, endpoints: EndpointTable, learnt: Callable[[], None]) -> None:
        self._config = config
        self._endpoints = endpoints
        self._learnt = learnt
        self._tasks: dict[LiveEndpoint, tuple[asyncio.Task[None], ...]] = {}
        self._suspected: dict[LiveEndpoint, asyncio.Task[None]] = {}
        self._peer_s: dict[LiveEndpoint, tuple[Slowness, float]] = {}
        self._checks: dict[LiveEndpoint, asyncio.Task[bool | None]] = {}
        self._listings: dict[LiveEndpoint, asyncio.Task[None]] = {}
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
                self._peer_s.pop(live, None)
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
        tasks: list[asyncio.Task[Any]] = [task for pair in self._tasks.values() for task in pair]
        tasks += [*self._suspected.values(), *self._checks.values(), *self._listings.values()]
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
        """Probe an endpoint now, and every second as long as it is out. One task per endpoint."""
        if self._session is not None and live not in self._suspected and not live.leaving:
            task = asyncio.create_task(self._recover(live), name=f"see whether {live.endpoint.name} is well")
            self._suspected[live] = task
            task.add_done_callback(lambda _: self._suspected.pop(live, None))

    async def _recover(self, live: LiveEndpoint) -> None:
        await self._tried(self._probe, live)
        while live.health.state in OUT:
            interval_s = min(RECOVERY_S, self._config.health.interval)
            await asyncio.sleep(interval_s * self._endpoints.rng.uniform(0.9, 1.1))
            await self._tried(self._probe, live)

    async def check(self, live: LiveEndpoint) -> bool | None:
        """Whether an endpoint is well enough for a retry; None when it was silent. Requests share a check."""
        if self._session is None:
            return True
        task = self._checks.get(live)
        if task is None:
            task = asyncio.create_task(self._check(live), name=f"check {live.endpoint.name}")
            self._checks[live] = task
            task.add_done_callback(lambda _: self._checks.pop(live, None))
        return await asyncio.shield(task)

    async def _check(self, live: LiveEndpoint) -> bool | None:
        timeout_s = min(CHECK_S, self._config.health.timeout)
        try:
            status, _ = await self._fetch(live, self._config.health.path, timeout_s, 4096)
        except UNREACHABLE as error:
            if not _is_unreachable(error):
                return None
            self._endpoints.refused(live)
            return False
        if status != 200:  # a good answer is no reason for a return: _probe() sees to that
            self._endpoints.probed(live, status)
        return status == 200

    def relist(self, live: LiveEndpoint) -> None:
        """Read an endpoint's list of models now. One task per endpoint."""
        if self._session is not None and live not in self._listings and not live.leaving:
            listing = self._tried(partial(self._list_models, limit_s=self._config.health.timeout), live)
            task = asyncio.create_task(listing, name=f"read the models of {live.endpoint.name}")
            self._listings[live] = task
            task.add_done_callback(lambda _: self._listings.pop(live, None))

    async def _look(self, live: LiveEndpoint) -> None:
        probes = () if live in self._suspected else (self._probe(live),)
        await asyncio.gather(*probes, self._scrape(live), self._list_models_if_due(live))

    async def _probe(self, live: LiveEndpoint) -> None:
        status, timeout_s = None, self._config.health.timeout
        try:
            status, _ = await self._fetch(live, self._config.health.path, timeout_s, 4096)
        except UNREACHABLE as error:
            if _is_unreachable(error):
                self._endpoints.refused(live)
        is_due = probe_due(live.health, monotonic()) or self._endpoints.is_needed(live)
        if status == 200 and live.stalled and is_due:
            if await self._generates(live, timeout_s):
                self._endpoints.progressed(live)
            else:
                status = None
        elif status == 200 and is_out_as_slow(live) and probe_due(live.health, monotonic()):
            status = 200 if await self._keeps_pace(live) else None
        if status == 200 and is_due and live.health.state in OUT:  # it may have been started with other models
            await self._list_models(live, limit_s=min(CHECK_S, timeout_s))
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
        model = _any_model(live)
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

    async def _keeps_pace(self, live: LiveEndpoint) -> bool:
        """Whether an endpoint that was ejected as slow does a small piece of work as fast as a peer.

        It is idle and the peer is not, so the least time that a peer has taken since the ejection counts.
        """
        peer, slowness = self._endpoints.peer_of(live), live.speed.slowness
        if peer is None or slowness is None:
            return True
        if not live.speed.take_probe(monotonic()):
            return False
        work = PROMPT_WORK if slowness.measure is Measure.TTFT else DECODE_WORK
        for _ in range(CONFIRMED):
            seconds, peer_s = await asyncio.gather(self._time(live, work), self._time(peer, work))
            if seconds is None or peer_s is None:
                return seconds is not None
            peer_s = self._least_peer_s(live, slowness, peer_s)
            if seconds >= CLEAR_RATIO * peer_s + LEAST_EXCESS_S:
                name = peer.endpoint.name
                log.info("endpoint %s is still slow: %.3f s, %s %.3f s", live.endpoint.name, seconds, name, peer_s)
                return False
        return True

    def _least_peer_s(self, live: LiveEndpoint, slowness: Slowness, peer_s: float) -> float:
        """The least time of peers since the endpoint was found that slow; it counts for less with every probe."""
        found, least_s = self._peer_s.get(live, (slowness, peer_s))
        if found is slowness:
            peer_s = min(peer_s, LEAST_GROWS * least_s)
        self._peer_s[live] = slowness, peer_s
        return peer_s

    async def _time(self, live: LiveEndpoint, work: PaceProbe) -> float | None:
        """Seconds that the endpoint takes for the work; None when it gives no whole answer."""
        model = _any_model(live)
        if model is None:
            return None
        words = " ".join(str(self._endpoints.rng.randrange(1000)) for _ in range(work.words))
        body: dict[str, object] = {"model": model, "prompt": words, "max_tokens": work.tokens, "ignore_eos": True}
        if live.endpoint.role is not Role.BOTH:
            body |= by_itself(live.endpoint.engine)
        began = monotonic()
        try:
            status, _ = await self._fetch(live, "/v1/completions", PACE_TIMEOUT_S, METRICS_LIMIT, body)
        except UNREACHABLE:
            return None
        return monotonic() - began if status == 200 else None

    async def _scrape(self, live: LiveEndpoint) -> None:
        path = scrape.PATHS[live.endpoint.engine]
        status, text = await self._get(live, path, self._config.scrape.timeout)
        if status == 200:
            self._endpoints.scraped(live, scrape.read(text, live.endpoint.engine))

    async def _list_models_if_due(self, live: LiveEndpoint) -> None:
        if live.models_at is None or monotonic() - live.models_at >= MODELS_EVERY_S:
            await self._list_models(live, limit_s=self._config.health.timeout)

    async def _list_models(self, live: LiveEndpoint, *, limit_s: float) -> None:
        """Read which models the engine lists. What it listed before holds unless it answers."""
        status, text = await self._get(live, "/v1/models", limit_s)
        names: tuple[str, ...] = ()
        if status == 200:
            try:
                names = tuple(str(entry["id"]) for entry in json.loads(text)["data"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return
        elif status not in NO_LIST:
            return
        live.models_at = monotonic()
        if (names, status == 200) != (live.models, live.has_list):
            live.models, live.has_list = names, status == 200
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
        secure = live.encryption
        async with (
            asyncio.timeout(timeout_s),
            self._session.request(
                method,
                url,
                headers=live.key_header,
                json=json_body,
                ssl=True if secure is None else secure.context,
                server_hostname=None if secure is None else secure.server_name,
            ) as answer,
        ):
            body = bytearray()
            async for piece in answer.content.iter_any():  # read(limit) would return what happens to be there
                body += piece
                if len(body) >= limit:
                    break
            return answer.status, bytes(body[:limit])


def _any_model(live: LiveEndpoint) -> str | None:
    """Return a name that the engine has, for requests of our own; None if none is known."""
    own = live.endpoint.served_model
    return own if own and (own in live.models or not live.models) else next(iter(live.models), None)


def _is_unreachable(error: BaseException) -> bool:
    """Whether no engine answers at the address: connecting failed, or the connection was lost."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return not is_own_error(error.os_error)
    return isinstance(error, aiohttp.ServerDisconnectedError) or (
        isinstance(error, OSError) and error.errno in CONNECTION_LOST
    )


def _forget_frames(error: BaseException) -> None:
    """What it came through: frames of libraries that hold the error are held by it, and a dead engine is probed each
    second; only the collector would end that."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
