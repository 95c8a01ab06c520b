"""The composition root: the only module that names concretes. Builds the gateway, runs it until told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import signal
from collections.abc import Callable, Coroutine
from random import Random
from time import monotonic
from typing import Any

import uvloop
import xxhash
from aiohttp import web

from gateway import admin, api
from gateway.account import AccessLog, Accounts
from gateway.client import Client
from gateway.config import Config, Listener
from gateway.endpoints import EndpointTable
from gateway.exchange import Exchange
from gateway.front import Front
from gateway.gate import Gate
from gateway.lobby import Lobby
from gateway.metrics import Metrics
from gateway.openai import Api
from gateway.outbox import Outbox
from gateway.prefixes import Prefixes
from gateway.serve import Gateway, serve
from gateway.snapshot import build
from gateway.split.handoffs import Handoffs
from gateway.talk import Talk
from gateway.watch.watcher import Watcher

log = logging.getLogger("penstock")

SWEEP_S = 0.25
BACKLOG = 4096


class App:
    """One gateway in one event loop: start(), then stop(). `url` and `admin_url` are set once it listens."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.url = self.admin_url = ""
        self.draining = False
        self.metrics = Metrics()
        self.fronts: set[Talk] = set()
        self._loop = asyncio.get_running_loop()
        self._ids = _Ids()
        self._prefixes = Prefixes(secrets.token_bytes(32), config.prefix.index, config.prefix.block_bytes)
        self._gate = Gate(config)
        self._outbox = Outbox(self._loop)
        rng = Random(secrets.randbits(64))
        self._endpoints = EndpointTable(config, self._prefixes, self.metrics, rng, self._outbox)
        self._endpoints.on_change = self._gate.refresh
        self._log = AccessLog(config.observability.access_log, config.observability.access_flush, self._loop)
        self._watcher = Watcher(config, self._endpoints, self._learnt)
        self.gateway = Gateway(
            build(config, 1, self._endpoints, self._gate, {}),
            self._endpoints,
            self._gate,
            Accounts(self.metrics, self._log),
            Handoffs(self.metrics, rng, self._outbox),
        )
        self._runners: list[web.AppRunner] = []
        self._servers: list[asyncio.Server] = []
        self._sweeping: asyncio.Task[None] | None = None
        self._follow_gauges()

    async def start(self) -> None:
        """Look at the engines once, then listen. Raises OSError when an address is taken."""
        await self._watcher.start()
        self._sweeping = asyncio.create_task(self._sweep(), name="sweep")
        self.url = await self._listen_api(self.config.listeners.api)
        self.admin_url = await self._listen_admin(self.config.listeners.admin)
        gc.freeze()  # what exists now lives as long as the process: spare the collector from walking it
        gc.set_threshold(10_000, 20, 50)  # requests leave no cycles behind; looking for them less often costs nothing

    async def stop(self) -> None:
        """Not ready, accept nothing new, let running answers end within the limit, then close everything."""
        self.draining = True
        for server in self._servers:
            server.close()
        ends = monotonic() + self.config.timeouts.shutdown
        leaving = [front.finish() for front in self._in_front()]
        for runner in self._runners:
            if runner.server is not None:
                runner.server.pre_shutdown()
                await runner.server.shutdown(self.config.timeouts.shutdown)
            await runner.cleanup()
        if leaving:
            await asyncio.wait(leaving, timeout=max(0.0, ends - monotonic()))
        for front in self._in_front():
            front.cut()
        await self._watcher.stop()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self.gateway.handoffs.close()
        self._endpoints.close()
        await self._log.close()

    def _in_front(self) -> list[Front]:
        """Client connections that aiohttp's server does not know of."""
        return [each for each in self.fronts if isinstance(each, Front)]

    def _serve(self, client: Client, api: Api) -> Coroutine[Any, Any, None]:
        return serve(self.gateway, Exchange(self._ids.next(), api, client.address, monotonic()), client)

    async def _doors(self) -> Callable[[], Front]:
        """What makes a protocol for every client connection."""
        runner = web.AppRunner(api.application(self), handler_cancellation=True, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        manager = runner.server
        assert manager is not None
        serve, fronts, limits, outbox = self._serve, self.fronts, self.config.limits, self._outbox
        return lambda: Front(serve, fronts, limits, outbox, lambda: Lobby(serve, fronts, limits, outbox, manager))

    async def _listen_api(self, where: Listener) -> str:
        server = await self._loop.create_server(await self._doors(), where.host, where.port, backlog=BACKLOG)
        self._servers.append(server)
        return _url(where.host, server.sockets[0].getsockname()[1])

    async def _listen_admin(self, where: Listener) -> str:
        runner = web.AppRunner(admin.application(self), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, where.host, where.port).start()
        self._runners.append(runner)
        return _url(where.host, runner.addresses[0][1])

    async def _sweep(self) -> None:
        """One timer for all deadlines of all connections; its own lateness is the loop's lag."""
        due = monotonic() + SWEEP_S
        while True:
            await asyncio.sleep(due - monotonic())
            now = monotonic()
            self.metrics.loop_lag_seconds.observe(max(0.0, now - due))
            due = now + SWEEP_S
            try:
                for front in tuple(self.fronts):
                    front.sweep(now)
                self._endpoints.sweep(now)
            except Exception:  # no deadline may end because one connection could not be swept
                log.exception("a sweep failed")

    def _learnt(self) -> None:
        """Engines told which models they serve: routes may change, everything else stays."""
        if self.config.models:
            return
        discovered: dict[str, list[str]] = {}
        for live in self._endpoints.all():
            names = discovered.setdefault(live.endpoint.pool, [])
            names += [name for name in live.models if name not in names]
        generation = self.gateway.snapshot.generation + 1
        self.gateway.snapshot = build(self.config, generation, self._endpoints, self._gate, discovered)

    def _follow_gauges(self) -> None:
        metrics, prefixes = self.metrics, self._prefixes
        metrics.retry_budget_remaining.follow(lambda: float(self._gate.retries_left))
        metrics.open_streams.follow(lambda: float(self._gate.active))
        metrics.prefix_index_bytes.follow(lambda: float(prefixes.index.stats().bytes))
        for room in self._gate.rooms():
            metrics.waiting.labels(room.name).follow(lambda room=room: float(room.waiting))  # type: ignore[misc]
        metrics.config_version_info.labels("1").set(1)


class _Ids:
    """Request ids: fixed length, unguessable (an engine may match aborts by prefix, faults.md F21), 0.4 us each."""

    __slots__ = ("_count", "_secret")

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        self._count = 0

    def next(self) -> str:
        self._count += 1
        return "req_" + xxhash.xxh3_128_hexdigest(self._secret + self._count.to_bytes(8, "little"))


def run(config: Config, ready: Callable[[App], None] | None = None) -> int:
    """Run a gateway until SIGINT or SIGTERM; the exit code. `ready` is called once it listens."""
    return uvloop.run(_run(config, ready))


async def _run(config: Config, ready: Callable[[App], None] | None) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    app = App(config)
    try:
        await app.start()
        if ready is not None:
            ready(app)
        await stopping.wait()
    except OSError as error:
        log.error("cannot listen: %s", error)
        return 1
    finally:
        await app.stop()
    return 0


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
