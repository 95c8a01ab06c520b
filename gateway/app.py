"""The composition root: the only module that names concretes. Builds a gateway, starts and stops it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from time import monotonic

import msgspec
from aiohttp import web

from gateway import admin, api
from gateway.account import AccessLog, Accounts
from gateway.begin import Beginning
from gateway.config import Config, Listener, Loaded
from gateway.connections import ClientConnections
from gateway.discovery.discovery import Discovery, made
from gateway.endpoints import EndpointTable
from gateway.forwarded import TrustedProxies
from gateway.front import Front
from gateway.gate import Gate
from gateway.litter import Litter
from gateway.lobby import Lobby
from gateway.metrics import Metrics
from gateway.networks import Networks
from gateway.observe.export import Tracer
from gateway.observe.inside import pools
from gateway.outbox import Outbox
from gateway.ports import http_url, named
from gateway.prefixes import Prefixes
from gateway.reload.follow import Follow
from gateway.reload.reloader import Reloader, Say
from gateway.reload.swap import Swap, discovered, furnish
from gateway.reload.trial import GatewayOnTrial, Trial
from gateway.reload.versions import Versions
from gateway.restart.channel import BoundTo
from gateway.restart.predecessor import Predecessor
from gateway.restart.sockets import ADMIN, API, BACKLOG, EMPTY, Sockets, bind, bound_send_buffers
from gateway.serve import Gateway
from gateway.shared.bus import ID_BYTES, Bus
from gateway.shared.local import LocalBus
from gateway.shared.pump import Pump
from gateway.shared.seal import Seal
from gateway.shared.view import View
from gateway.snapshot import build
from gateway.split.handoffs import Handoffs
from gateway.tls_clients import redis_settings
from gateway.tls_listener import Accept, TlsListeners
from gateway.watch.watcher import Watcher

log = logging.getLogger("penstock")

SWEEP_S = 0.25
PULSE_S = 0.1
QUIET_S = 0.02  # between two looks at whether everybody has gone
LAST_WORDS_S = 1.0  # for telling those who are still served that the gateway stops
SETTLE_S = 0.3
FLUSH_S, MEMORY_BYTES = 0.05, 16 << 20  # between gateways of one machine


def log_reload(line: str, bad: bool) -> None:
    """Tell the operator what became of a new configuration."""
    log.log(logging.ERROR if bad else logging.INFO, "%s", line)


class Local(msgspec.Struct, frozen=True):
    """One of several gateways of this machine, number 0 and up: the socket `hub` at which they meet, the secret that
    they have in common, where its admin server is found, and what it begins with: the number of the version of its
    configuration (None: it is the first of them, and finds it), and the names of endpoints that were drained by hand.
    Number 0 alone writes versions to a folder."""

    hub: str
    secret: bytes
    number: int
    admin: str
    version: int | None
    drained: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Local({self.number})"


class Origin(msgspec.Struct, frozen=True):
    """Where a configuration came from. `file` is what a reload reads, if there is one, references filled from `env`;
    `say` tells the operator of a reload. `local` is where it meets others of this machine, if it is one of several.
    `sockets` listen already: systemd, a supervisor or the `predecessor`, which this process replaces, opened them.
    Those of `activated` listeners are systemd's, wherever they listen."""

    loaded: Loaded
    file: Path | None = None
    env: Mapping[str, str] = {}
    say: Say = log_reload
    local: Local | None = None
    sockets: Sockets = EMPTY
    activated: frozenset[str] = frozenset()
    predecessor: Predecessor | None = None


class App:
    """One gateway in one event loop: start(), then stop(). `url` and `admin_url` are set once it listens; `end` asks
    whoever runs it to stop it."""

    def __init__(self, config: Config, origin: Origin | None = None) -> None:
        """`config` is what it starts with; `origin` is needed for following a file."""
        origin = origin or Origin(Loaded(config))
        self.config = config
        self.url = self.admin_url = ""
        self.draining = False
        self.end: Callable[[], None] = lambda: None
        self._local = origin.local
        self.metrics = Metrics()
        self._loop = asyncio.get_running_loop()
        seal = _seal(config, origin.local)
        self._predecessor, self._has_retired = origin.predecessor, False
        inherited = None if origin.predecessor is None else origin.predecessor.secret
        self.secret = inherited or secrets.token_bytes(32) if seal is None else seal.fingerprint_secret
        self._prefixes = Prefixes(self.secret, config.prefix.index, config.prefix.block_bytes)
        self._gate = Gate(config)
        trusted, refused = Networks(config.listeners.api.trusted_proxies), self.metrics.inside.connections_refused_total
        self.fronts = ClientConnections(self._gate, trusted, lambda reason: refused.labels(reason).inc())
        self._outbox = Outbox(self._loop)
        rng = Random(secrets.randbits(64))
        self._endpoints = EndpointTable(config, self._prefixes, self.metrics, rng, self._outbox)
        self._endpoints.on_change = self._gate.refresh
        seen = config.observability
        dropped = self.metrics.inside.log_lines_dropped_total
        self._log = AccessLog(seen, self._loop, dropped)
        self._tracer = Tracer(self.metrics, Random(secrets.randbits(64)), origin.env)
        self._watcher = Watcher(config, self._endpoints, self._learnt)
        self._endpoints.on_out, self._endpoints.ask_health = self._watcher.suspect, self._watcher.check
        self._endpoints.on_model_gone = self._watcher.relist
        self._pump = None if seal is None else self._join(seal, origin.local, rng)
        plan = build(config, self._endpoints, self._gate, {})
        self._endpoints.adopt(plan.adoption)
        self.gateway = Gateway(
            plan.snapshot,
            self._endpoints,
            self._gate,
            Accounts(self.metrics, self._log, self._tracer, self._loop),
            Handoffs(self.metrics, rng, self._outbox),
        )
        self._beginning = Beginning(
            self.gateway, self.metrics.itl_seconds, TrustedProxies(trusted) if trusted else None
        )
        furnish(self.gateway, plan, self.metrics)
        self.metrics.pools = partial(pools, self.gateway)
        self._let_change(origin, rng)
        self._runners: list[web.AppRunner] = []
        self.sockets, self._activated = dict(origin.sockets), origin.activated
        self._servers: dict[str, list[asyncio.Server]] = {}
        self._tls = TlsListeners(self.metrics.inside, self.fronts, lambda: self.gateway.snapshot.config.limits)
        self._litter = Litter(monotonic())
        self._sweeping: asyncio.Task[None] | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._follow_gauges()

    def _let_change(self, origin: Origin, rng: Random) -> None:
        """What puts another configuration in force while it runs, and what asks for that."""
        self.swap = Swap(self.gateway, self._watcher, self.metrics)
        kept = None if origin.local is None else _versions(self.config, origin.local)
        folder = Path(origin.loaded.file).parent  # where relative paths of every text that is offered start from
        self._discovery = Discovery(self._endpoints.found, self._found, rng, partial(made, folder))
        self.swap.discover = self._discovery.follow
        self.reloader = Reloader(origin.loaded, origin.file, self.swap, self.metrics, origin.env, origin.say, kept)
        self._follow = Follow(self.reloader)
        self._trial = Trial(GatewayOnTrial(self.reloader, self.metrics), origin.say)
        self.reloader.on_applied = self._applied

    async def _applied(self, trigger: str) -> None:
        config = self.reloader.running.config
        self._tls.follow(config.listeners)
        bound_send_buffers(chain(*self.sockets.values()), config.limits.send_buffer)
        await self._trial.applied(trigger)

    async def start(self) -> None:
        """Look at the engines once, then listen. Raises OSError when an address is taken."""
        await self._discovery.start(self.config)
        await self._watcher.start()
        if self._local is not None:
            self._endpoints.drain_named(self._local.drained)
        self._sweeping = asyncio.create_task(self._sweep(), name="sweep")
        self._pulse = self._loop.call_later(PULSE_S, self._beat)
        if self._pump is not None:
            await self._pump.start()
        if self._local is None:  # else somebody follows the file for all
            await self._follow.start()
            self._trial.start()
        if self._predecessor is not None:
            await self._predecessor.warm(self.gateway, self.config, self.secret)
        listeners = self.config.listeners
        with named("listeners.api", listeners.api.host, listeners.api.port):
            self.url = await self._listen_api(listeners.api)
        with named("listeners.admin", listeners.admin.host, listeners.admin.port):
            self.admin_url = await self._listen_admin(listeners.admin)
        self._litter.settle()
        if self._predecessor is not None:
            await self._predecessor.ready(self.gateway if self.config.shared is None else None)

    @property
    def bound(self) -> list[tuple[BoundTo, socket.socket]]:
        """The listening sockets, for a successor, and where this process's configuration wanted them."""
        where = {API: self.config.listeners.api, ADMIN: self.config.listeners.admin}
        return [
            (BoundTo(name, where[name].host, where[name].port, activated=name in self._activated), each)
            for name, own in self.sockets.items()
            for each in own
        ]

    async def retire(self) -> None:
        """Another process accepts connections in place of this one: serve those that are here to their end, for
        timeouts.handover at most. An idle one gets one more request."""
        self.draining = self._has_retired = True
        limit_s, active = self.gateway.snapshot.config.timeouts.handover, self._gate.active
        ends = monotonic() + limit_s
        log.info("drain begins: %d connections, %d requests, at most %g s", len(self.fronts), active, limit_s)
        await self._follow.stop()
        for server in chain(*self._servers.values()):
            server.close()
        for client in tuple(self.fronts):
            client.drain()
        if self._local is None and self._runners[-1].server is not None:  # a worker's supervisor still asks it
            await self._runners[-1].server.shutdown(LAST_WORDS_S)
        while monotonic() < ends and (len(self.fronts) or (self._predecessor and self._predecessor.is_alive)):  # noqa: ASYNC110
            await asyncio.sleep(SWEEP_S)

    async def stop(self) -> None:
        """Not ready, accept nothing new, let running answers end within the limit, then close everything."""
        began, self.draining = monotonic(), True
        before = None if self._predecessor is None else asyncio.create_task(self._predecessor.stop(self._longest_s))
        await self._follow.stop()
        await self._discovery.stop()
        await self._trial.stop()
        for server in self._servers.get(API, ()):
            server.close()
        self._tls.close()
        if self._local is not None:
            await asyncio.sleep(SETTLE_S)  # whoever was accepted a moment ago is about to ask
        shutdown_s = self.gateway.snapshot.config.timeouts.shutdown
        ends = monotonic() + shutdown_s
        log.info("drain begins: %d requests under way, at most %g s for them", self._gate.active, shutdown_s)
        leaving = [front.finish() for front in self._in_front()]
        await self._quiet(leaving, ends)
        if monotonic() >= ends:
            log.warning("drain: %d requests are not over and end with an error now", self._gate.active)
            ends = monotonic() + LAST_WORDS_S
            await self._last_words()
            await self._quiet(leaving, ends)
        for server in self._servers.get(ADMIN, ()):
            server.close()
        for runner in self._runners:
            if runner.server is not None:
                runner.server.pre_shutdown()
                await runner.server.shutdown(max(0.0, ends - monotonic()))
            await runner.cleanup()
        for front in self._in_front():
            front.cut()
        if self._pump is not None:
            await self._pump.stop()
        await self._watcher.stop()
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._pulse is not None:
            self._pulse.cancel()
        self.gateway.handoffs.close()
        self._endpoints.close()
        self.gateway.accounts.settle()
        if before is not None:
            await before
        await self._tracer.close()
        await self._log.close()
        log.info("drain ended after %.1f s; the gateway stops", monotonic() - began)

    @property
    def _longest_s(self) -> float:
        """How long a process may take to stop."""
        return self.gateway.snapshot.config.timeouts.shutdown + LAST_WORDS_S + SETTLE_S

    def reopen_log(self) -> None:
        """Open the access log by its path again, if the file was moved away."""
        self._log.reopen()

    async def _quiet(self, leaving: Sequence[asyncio.Future[None]], ends: float) -> None:
        """Until nobody is served or connected any more, or that moment."""
        while monotonic() < ends and (self._gate.active or not all(map(_over, leaving))):  # noqa: ASYNC110
            await asyncio.sleep(QUIET_S)

    async def _last_words(self) -> None:
        """Tell those who are still served; who is in the middle of an event may see its end, which is a token away."""
        ends = monotonic() + LAST_WORDS_S / 2
        self._endpoints.retire()
        self._gate.end_retries()
        while self._endpoints.give_up() and monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(QUIET_S)
        self._endpoints.give_up(at_once=True)

    async def recede(self) -> None:
        """Not ready, and serving still: whoever sends requests here has `timeouts.grace` to notice."""
        self.draining = True
        grace_s = self.gateway.snapshot.config.timeouts.grace or 0.0
        log.info("SIGTERM: not ready from now on, and still serving for %g s (timeouts.grace)", grace_s)
        await asyncio.sleep(grace_s)

    def shared_state(self) -> dict[str, object] | None:
        """How it stands with the view that gateways share; None: this one is alone, or shares it with workers only."""
        return None if self._pump is None or self.config.shared is None else self._pump.state()

    def _join(self, seal: Seal, local: Local | None, rng: Random) -> Pump:
        """What tells other gateways, and hears of them."""
        config, shared = self.config, self.config.shared
        memory_bytes = MEMORY_BYTES if shared is None else shared.memory
        view = View(seal, self._endpoints, self._gate, self.metrics, config.prefix.block_bytes, memory_bytes)
        bus: Bus
        if shared is not None:
            from gateway.shared.redis import Place, RedisBus  # 60 ms that only those pay who want it

            password = None if shared.redis.password is None else shared.redis.password.reveal()
            encryption = redis_settings(shared.redis.url, shared.redis.tls)
            place = Place(shared.redis.url, shared.fleet, shared.redis.username, password, encryption)
            bus = RedisBus(place, rng, view.drop)
        else:
            assert local is not None
            bus = LocalBus(Path(local.hub), view.drop)
        view.suspect = self._watcher.suspect
        view.tenants = lambda: self.gateway.snapshot.config.tenants
        self._endpoints.news = view.news
        self._gate.tell(view.news)
        return Pump(view, bus, FLUSH_S if shared is None else shared.flush, self.metrics, rng)

    def _in_front(self) -> list[Front]:
        """Client connections that aiohttp's server does not know of."""
        return [each for each in self.fronts if isinstance(each, Front)]

    async def _doors(self) -> Callable[[], Front]:
        """What makes a protocol for every client connection."""
        runner = web.AppRunner(api.application(self), handler_cancellation=True, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        manager = runner.server
        assert manager is not None
        serve, fronts, gateway, outbox = self._beginning.serve, self.fronts, self.gateway, self._outbox

        def front() -> Front:  # a connection keeps the limits that it began with
            limits = gateway.snapshot.config.limits
            made = Front(serve, fronts, limits, outbox, lambda: Lobby(serve, fronts, limits, outbox, manager))
            if self._has_retired:  # accepted in the last moment
                made.drain()
            return made

        return front

    async def _listen_api(self, where: Listener) -> str:
        return await self._accept(API, where, await self._doors())

    async def _listen_admin(self, where: Listener) -> str:
        runner = web.AppRunner(admin.application(self), access_log=None)
        await runner.setup()
        self._runners.append(runner)
        if self._local is not None:
            await web.UnixSite(runner, self._local.admin).start()
            return ""
        assert runner.server is not None
        return await self._accept(ADMIN, where, runner.server)

    async def _accept(self, name: str, where: Listener, make: Accept) -> str:
        """Listen, on sockets that were given or on new ones. The URL."""
        accept = self._tls.wrap(name, where.tls, make)
        sockets = self.sockets[name] = self.sockets.get(name) or bind(where.host, where.port)
        bound_send_buffers(sockets, self.gateway.snapshot.config.limits.send_buffer)
        servers = [await self._loop.create_server(accept, sock=each, backlog=BACKLOG) for each in sockets]
        self._servers[name] = servers
        return http_url(where.host, sockets[0].getsockname()[1], encrypted=where.tls is not None)

    def _beat(self) -> None:
        """The clockwork of admissions."""
        self._pulse = self._loop.call_later(PULSE_S, self._beat)
        try:
            self._gate.tick(monotonic())
        except Exception:  # an admission may be anybody's: the next beat may do better
            log.exception("an admission failed at its tick")

    async def _sweep(self) -> None:
        """One timer for all deadlines of all connections; its own lateness is the loop's lag."""
        due = monotonic() + SWEEP_S
        while True:
            await asyncio.sleep(due - monotonic())
            now = monotonic()
            self.metrics.loop_lag_seconds.observe(max(0.0, now - due))
            due = now + SWEEP_S
            try:
                self.gateway.handoffs.sweep(now)
                for front in tuple(self.fronts):
                    front.sweep(now)
                self._endpoints.sweep(now)
                self.gateway.hedger.sweep(self.gateway, now)
                self.gateway.accounts.settle()  # before the series go that it would bring back
                self.swap.sweep()
                self._litter.sweep(now, self._gate.active)
            except Exception:  # no deadline may end because one connection could not be swept
                log.exception("a sweep failed")

    def _learnt(self) -> None:
        """An engine lists other models than before: routes may change, everything else stays."""
        before = self.gateway.snapshot
        plan = build(before.config, self._endpoints, self._gate, discovered(self.gateway), before)
        after = plan.snapshot
        if not before.config.models or (after.able, after.unlisted) != (before.able, before.unlisted):
            self.swap.carry_out(plan)

    def _found(self) -> None:
        """Endpoints were discovered, or are gone: they come and leave as by a reload."""
        snapshot = self.gateway.snapshot
        self.swap.carry_out(build(snapshot.config, self._endpoints, self._gate, discovered(self.gateway), snapshot))

    def _follow_gauges(self) -> None:
        metrics, prefixes = self.metrics, self._prefixes
        metrics.retry_budget_remaining.follow(lambda: self._gate.retries_left)
        metrics.open_streams.follow(lambda: float(self._gate.active))
        metrics.prefix_index_bytes.follow(lambda: float(prefixes.index.stats().bytes))
        inside, handoffs = metrics.inside, self.gateway.handoffs
        inside.connections.follow(lambda: float(len(self.fronts)))
        inside.body_bytes.follow(lambda: float(self._gate.body_bytes))
        inside.split_live.follow(lambda: float(handoffs.under_way))
        inside.tasks.follow(lambda: float(len(asyncio.all_tasks(self._loop))))


def _versions(config: Config, local: Local) -> Versions:
    folder = config.reload.state_dir if not local.number else None
    return Versions(None if folder is None else Path(folder), local.version)


def _seal(config: Config, local: Local | None) -> Seal | None:
    """What makes this gateway one of several; None: it is alone."""
    if config.shared is not None:
        return Seal(config.shared.key.reveal().encode(), secrets.token_bytes(ID_BYTES))
    return None if local is None else Seal(local.secret, secrets.token_bytes(ID_BYTES))


def _over(leaving: asyncio.Future[None]) -> bool:
    return leaving.done()
