"""The supervisor of several workers: starts them, replaces them, restarts dead ones, stops them.

It handles no API traffic. Each worker has its own listening socket on the API port, which the
supervisor keeps open: clients that connect while a worker is replaced wait instead of being
refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import web

from gateway.admin.fleet_status import DRAINED
from gateway.config import AdminListener, Loaded
from gateway.http.listener_sockets import ADMIN, API, EMPTY, Sockets, bind, bound_send_buffers
from gateway.http.tls_listener import TlsListener
from gateway.peers.local_bus import Hub
from gateway.reload.auto_rollback import Trial
from gateway.reload.file_watcher import Follow
from gateway.reload.reloader import Say
from gateway.restart import notify
from gateway.restart.predecessor import Predecessor
from gateway.util.addresses import http_url, named
from gateway.workers import pages
from gateway.workers.auto_rollback import WorkersOnTrial
from gateway.workers.config_rollout import Configured
from gateway.workers.settings import Settings
from gateway.workers.supervisor_metrics import Figures
from gateway.workers.worker_process import Worker, inheritable, listening

log = logging.getLogger("penstock")

MIN_RETRY_S, MAX_RETRY_S = 0.2, 10.0
# A worker that ran for this long did not die of the same cause as the one before it.
STEADY_S = 10.0
DRAIN_MARGIN_S = 5.0


class Place:
    """The slot of one worker, which outlives the process.

    `retry_s` is the delay before the next restart.
    """

    __slots__ = ("listener", "number", "retry_s", "task", "worker")

    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number = number
        self.listener = listener
        self.worker: Worker | None = None
        self.retry_s = MIN_RETRY_S
        self.task: asyncio.Task[None] | None = None


class Supervisor:
    """Runs the workers and their admin server; call `start`, then `stop`.

    `url` and `admin_url` are set once all workers serve.
    """

    def __init__(
        self,
        loaded: Loaded,
        file: Path | None,
        env: Mapping[str, str],
        say: Say,
        count: int,
        sockets: Sockets = EMPTY,
    ) -> None:
        """Prepare the supervisor.

        `sockets` are those that systemd has opened; all workers share that of the API.
        """
        self.count = count
        self.draining = False
        self.url = self.admin_url = ""
        self.configured = Configured(loaded, file, env, self.ready, say, self._lost)
        self.figures = Figures()
        self.figures.workers.follow(lambda: float(len(self.ready())))
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        lost = self.figures.frames_dropped_total
        self._hub = Hub(self._path("hub"), lambda reason: lost.labels(reason).inc())
        self._secret = secrets.token_bytes(32)
        self._sockets, self._env = sockets, env
        self._places: list[Place] = []
        self._ending: dict[Worker, asyncio.Task[None]] = {}
        self._rolls: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._admin_servers: list[asyncio.Server] = []
        self._follow = Follow(self.configured)
        self._trial = Trial(
            WorkersOnTrial(self.configured, lambda: [*self.ready(), *self.ending()]), say
        )
        self._admin_tls: TlsListener | None = None
        self.configured.on_applied = self._on_applied
        self._started = 0
        self._rolling = asyncio.Lock()

    async def _on_applied(self, trigger: str) -> None:
        if self._admin_tls is not None:
            self._admin_tls.follow(self.configured.running.config.listeners.admin.tls)
        await self._trial.applied(trigger)

    def ready(self) -> list[Worker]:
        """Return the workers that serve requests, oldest first."""
        workers = [place.worker for place in self._places if place.worker is not None]
        return sorted(
            (worker for worker in workers if worker.ready_at is not None),
            key=lambda worker: worker.started_at,
        )

    def ending(self) -> list[Worker]:
        """Return the replaced workers that are finishing their requests."""
        return list(self._ending)

    async def start(self) -> None:
        """Start the workers and the admin server.

        Raises OSError when an address is in use, RuntimeError when a worker does not become ready.
        """
        await self._hub.start()
        api, admin = (
            self.configured.running.config.listeners.api,
            self.configured.running.config.listeners.admin,
        )
        port, inherited = api.port, self._sockets.get(API)
        for number in range(self.count):
            with named("listeners.api", api.host, api.port):
                listener = (
                    listening(api.host, port)
                    if inherited is None
                    else inheritable(inherited[0].dup())
                )
            port = listener.getsockname()[1]
            self._places.append(Place(number, listener))
        self.url = http_url(api.host, port, encrypted=api.tls is not None)
        async with self.configured.one_at_a_time:
            await self._start_all()
        for place in self._places:
            place.task = asyncio.create_task(
                self._keep_running(place), name=f"look after worker {place.number}"
            )
        self._runner = web.AppRunner(pages.application(self), access_log=None)
        await self._runner.setup()
        with named("listeners.admin", admin.host, admin.port):
            await self._listen_admin(self._runner, admin)
        await self._follow.start()
        self._trial.start()

    async def _listen_admin(self, runner: web.AppRunner, admin: AdminListener) -> None:
        sockets = self._sockets.get(ADMIN) or bind(admin.host, admin.port)
        bound_send_buffers(sockets, self.configured.running.config.limits.send_buffer)
        self.admin_url = http_url(
            admin.host, sockets[0].getsockname()[1], encrypted=admin.tls is not None
        )
        if admin.tls is None:
            for listener in sockets:
                await web.SockSite(runner, listener).start()
            return
        assert runner.server is not None
        close_s = self.configured.running.config.limits.slow_reader
        self._admin_tls = TlsListener(admin.tls, runner.server, close_s, lambda: None)
        loop = asyncio.get_running_loop()
        self._admin_servers = [
            await loop.create_server(self._admin_tls.accept, sock=listener) for listener in sockets
        ]

    async def _start_all(self) -> None:
        """Start the first worker, which determines the version number, then the others.

        Raises RuntimeError when a worker does not become ready.
        """
        first, *others = self._places
        workers = [await self._start_worker(first, finds_version=True)]
        if workers[0] is not None:
            self.configured.numbered(
                json.loads((await workers[0].ask("GET", "/config")).body)["version"]
            )
            workers += await asyncio.gather(*(self._start_worker(place) for place in others))
        if not all(workers):
            raise RuntimeError("a worker did not become ready; its messages are above")

    async def recede(self) -> None:
        """Report not ready, and keep serving for timeouts.grace so that load balancers notice."""
        self.draining = True
        grace_s = self.configured.running.config.timeouts.grace or 0.0
        log.info(
            "SIGTERM: not ready from now on, and still serving for %g s (timeouts.grace)", grace_s
        )
        await asyncio.sleep(grace_s)

    async def stop(self) -> None:
        """Drain and stop all workers, then the admin server."""
        started_at, self.draining = monotonic(), True
        log.info("draining: %d workers finish their requests", len(self.ready()))
        await self._follow.stop()
        await self._trial.stop()
        for task in (*self._rolls, *(place.task for place in self._places)):
            if task is not None:
                task.cancel()
        workers = [place.worker for place in self._places if place.worker is not None]
        for worker in (*workers, *self._ending):
            worker.drain()
        await asyncio.gather(
            *(worker.gone(self._drain_s()) for worker in workers), *self._ending.values()
        )
        if self._runner is not None:
            await self._runner.cleanup()
        for server in self._admin_servers:
            server.close()
        await self._hub.stop()
        for place in self._places:
            place.listener.close()
        self._folder.cleanup()
        log.info("drained after %.1f s; the gateway stops", monotonic() - started_at)

    async def hang_up(self) -> None:
        """Handle SIGHUP: make workers reopen the access log, then reload the configuration file."""
        for worker in (*self.ready(), *self.ending()):
            worker.hang_up()
        notify.reloading(self._env)
        try:
            await self.configured.reload()
        finally:
            notify.ready(self._env)

    async def roll(self) -> None:
        """Replace the workers one by one; each is ready before the old one stops accepting."""
        async with self._rolling:
            for place in self._places:
                await self._renew(place)
        log.warning("replaced all %d workers", self.count)

    def _lost(self, worker: Worker) -> None:
        """Replace a worker that may not have the same configuration as the others."""

        async def renew() -> None:
            async with self._rolling:
                for place in self._places:
                    if place.worker is worker:
                        await self._renew(place)

        task = asyncio.create_task(renew(), name=f"replace worker {worker.number}")
        self._rolls.add(task)
        task.add_done_callback(self._rolls.discard)

    async def _renew(self, place: Place) -> None:
        old = place.worker
        if place.task is not None:
            place.task.cancel()
            await asyncio.gather(place.task, return_exceptions=True)
        if await self._replace(place) is None:
            log.error("cannot replace worker %d; the old process continues", place.number)
            place.worker = old
        elif old is not None:
            self._retire(old)
        place.task = asyncio.create_task(
            self._keep_running(place), name=f"look after worker {place.number}"
        )

    def _retire(self, worker: Worker) -> None:
        """Retire a worker: it ends with its last connection, and is killed after a timeout."""
        worker.retire()
        within_s = self.configured.running.config.timeouts.handover + self._drain_s()
        task = asyncio.create_task(worker.gone(within_s), name=f"drain worker {worker.number}")
        self._ending[worker] = task
        task.add_done_callback(lambda _: self._ending.pop(worker, None))

    def _drain_s(self) -> float:
        return self.configured.running.config.timeouts.shutdown + DRAIN_MARGIN_S

    async def _start_worker(self, place: Place, *, finds_version: bool = False) -> Worker | None:
        """Start a worker in this slot; return it once it is ready, or None.

        A caller that is cancelled meanwhile leaves no process behind.
        """
        running, file = self.configured.running, self.configured.file
        self._started += 1
        settings = Settings(
            place.number,
            running.file,
            running.text,
            place.listener.fileno(),
            str(self._path("hub")),
            str(self._path(f"admin-{self._started}")),
            self._secret,
            None if file is None else str(file),
            None if finds_version else self.configured.version,
            await self._drained(),
        )
        try:
            worker = await Worker.start(settings, place.listener)
        except OSError as error:
            # The system is out of memory, processes or descriptors; a later attempt may succeed.
            log.error("cannot start worker %d: %s", place.number, error)
            return None
        is_ready = False
        try:
            is_ready = await worker.becomes_ready()
        finally:
            if not is_ready:
                await worker.gone(0.0)
        if is_ready:
            place.worker = worker
        return worker if is_ready else None

    async def _drained(self) -> tuple[str, ...]:
        """Return the endpoints that an operator has drained, as the oldest ready worker reports."""
        response = await pages.first(self.ready(), "/endpoints")
        rows = json.loads(response.body)["endpoints"] if response.status == 200 else ()
        return tuple(row["name"] for row in rows if row["state"] in DRAINED)

    async def _replace(self, place: Place) -> Worker | None:
        """Start a worker like `_start_worker`, with no configuration change or drain meanwhile."""
        async with self.configured.one_at_a_time:
            return await self._start_worker(place)

    async def _keep_running(self, place: Place) -> None:
        while True:
            worker = place.worker
            if worker is not None:
                code = await worker.process.wait()
                place.worker = None
                await worker.close()
                self.figures.deaths_total.inc()
                if worker.ready_at is not None and monotonic() - worker.ready_at > STEADY_S:
                    place.retry_s = MIN_RETRY_S
                log.error(
                    "worker %d ended (status %s); restarting it in %.1f s",
                    place.number,
                    code,
                    place.retry_s,
                )
            await asyncio.sleep(place.retry_s)
            place.retry_s = min(MAX_RETRY_S, 2 * place.retry_s)
            if await self._replace(place) is not None:
                log.warning("worker %d serves again", place.number)

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name


def run(
    loaded: Loaded,
    file: Path | None,
    env: Mapping[str, str],
    say: Say,
    count: int,
    ready: Callable[[Supervisor], None],
    sockets: Sockets = EMPTY,
    predecessor: Predecessor | None = None,
) -> int:
    """Run the workers until SIGINT or SIGTERM and return the exit code.

    SIGHUP reloads the configuration file, SIGUSR2 replaces the workers.
    """
    return asyncio.run(
        _run(Supervisor(loaded, file, env, say, count, sockets), ready, env, predecessor)
    )


async def _run(
    supervisor: Supervisor,
    ready: Callable[[Supervisor], None],
    env: Mapping[str, str],
    predecessor: Predecessor | None,
) -> int:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[Any]] = set()

    def start_task(work: Any) -> None:
        task = loop.create_task(work())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    signals: set[signal.Signals] = set()

    def on_stop_signal(number: signal.Signals) -> None:
        signals.add(number)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop_signal, number)
    loop.add_signal_handler(signal.SIGHUP, start_task, supervisor.hang_up)
    loop.add_signal_handler(signal.SIGUSR2, start_task, supervisor.roll)
    try:
        await supervisor.start()
        ready(supervisor)
        if predecessor is None:
            notify.ready(env)
        else:
            await predecessor.decline()
            await predecessor.ready()
        await stopping.wait()
        notify.stopping(env)
        # Only SIGTERM waits for load balancers; after Ctrl-C there is no need to.
        if signal.SIGTERM in signals:
            await supervisor.recede()
    except (OSError, RuntimeError) as error:
        log.error("cannot serve: %s", error)
        return 1
    finally:
        for task in tasks:
            task.cancel()
        with suppress(ProcessLookupError):
            await supervisor.stop()
        if predecessor is not None:
            await predecessor.stop(supervisor.configured.running.config.timeouts.shutdown)
    return 0
