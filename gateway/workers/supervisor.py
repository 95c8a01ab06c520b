"""The supervisor of several worker processes: it starts, replaces, restarts and stops them.

It handles no API traffic. Each worker has its own listening socket on the API port, and the
supervisor keeps these sockets open. Therefore clients that connect while a worker is replaced have
to wait, but are not refused.
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
from time import monotonic, time
from typing import Any

from aiohttp import web

from gateway.admin.endpoints_page import DRAINED_STATES
from gateway.auto.auto_controller import AutoPolicyController
from gateway.config import AdminListener, LoadedConfig
from gateway.drift.drift_monitor import DriftMonitor
from gateway.http.listener_sockets import (
    ADMIN,
    ADMIN_RECEIVE_BUFFER,
    API,
    NO_SOCKETS,
    SocketsByName,
    bind,
    limit_receive_buffers,
    limit_send_buffers,
    naming_config_key,
)
from gateway.http.tls_listener import TlsListener
from gateway.peers.local_bus import LocalHub
from gateway.reload.auto_rollback import AutoRollbackMonitor
from gateway.reload.file_watcher import FileWatcher
from gateway.reload.reloader import ReportLine
from gateway.restart import systemd_notify
from gateway.restart.new_process_side import Predecessor
from gateway.restart.worker_launch_settings import WorkerLaunchSettings, WorkerSettings
from gateway.util.urls import http_url
from gateway.workers import admin_server
from gateway.workers.auto_config_access import WorkersConfigAccess
from gateway.workers.auto_rollback import WorkersRollbackTarget
from gateway.workers.config_rollout import ConfigRollout
from gateway.workers.drift_collector import DriftCollector
from gateway.workers.supervisor_metrics import SupervisorMetrics
from gateway.workers.worker_process import Worker, make_inheritable, new_listener

log = logging.getLogger("penstock")

MIN_RETRY_S, MAX_RETRY_S = 0.2, 10.0
# A worker that ran for this long did not die of the same cause as the one before it.
STABLE_AFTER_S = 10.0
DRAIN_MARGIN_S = 5.0


class WorkerSlot:
    """The place of one worker, in which a new process can replace one that has ended.

    listener  the worker's listening socket; clients can connect to it even without a process
    worker    the current process; None before the first start
    retry_s   seconds to wait before a worker that has ended is started again
    task      the task that starts the worker again
    """

    __slots__ = ("listener", "number", "retry_s", "task", "worker")

    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number = number
        self.listener = listener
        self.worker: Worker | None = None
        self.retry_s = MIN_RETRY_S
        self.task: asyncio.Task[None] | None = None


class Supervisor:
    """Runs the workers and their admin server. Call `start`, then `stop`.

    url        address of the API, set once all workers serve
    admin_url  address of the admin server, set once all workers serve
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        file: Path | None,
        env: Mapping[str, str],
        report_line: ReportLine,
        count: int,
        sockets: SocketsByName = NO_SOCKETS,
    ) -> None:
        """Prepare a supervisor of `count` worker processes.

        loaded       the configuration
        file         the file that a reload reads; None if the engines were given on the command
                     line
        env          environment variables that the configuration may refer to
        report_line  reports the outcome of a reload to the operator
        count        number of worker processes
        sockets      the sockets that systemd has opened; all workers share the API's socket
        """
        self.worker_count = count
        self.is_draining = False
        self.url = self.admin_url = ""
        self.config_rollout = ConfigRollout(
            loaded, file, env, self.ready_workers, report_line, self._on_worker_lost
        )
        self.metrics = SupervisorMetrics()
        self.metrics.workers.set_function(lambda: float(len(self.ready_workers())))
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        lost = self.metrics.frames_dropped_total
        self._hub = LocalHub(self._path("hub"), lambda reason: lost.labels(reason).inc())
        self._secret = secrets.token_bytes(32)
        self._sockets, self._env = sockets, env
        self._slots: list[WorkerSlot] = []
        self._ending: dict[Worker, asyncio.Task[None]] = {}
        self._rolls: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._admin_servers: list[asyncio.Server] = []
        self._follow = FileWatcher(self.config_rollout)
        self._admin_tls: TlsListener | None = None
        self.config_rollout.on_applied = self._on_applied
        self._started = 0
        self._rolling = asyncio.Lock()
        self._create_monitors(loaded, report_line)

    def _create_monitors(self, loaded: LoadedConfig, report_line: ReportLine) -> None:
        # Create what observes the requests of all workers and may change their configuration.
        self._trial = AutoRollbackMonitor(
            WorkersRollbackTarget(self.config_rollout, self._workers_with_requests), report_line
        )
        self.auto = AutoPolicyController(
            WorkersConfigAccess(
                self.config_rollout,
                lambda: admin_server.endpoint_rows(self.ready_workers()),
                lambda: self.is_draining,
            ),
            self.metrics.auto_metrics,
        )
        self.drift = DriftMonitor(self.metrics.drift_metrics)
        self.drift.configure(loaded.config, time())
        self._drift_collector = DriftCollector(self.drift, self._workers_with_requests)

    def _workers_with_requests(self) -> list[Worker]:
        return [*self.ready_workers(), *self.ending_workers()]

    async def _on_applied(self, trigger: str) -> None:
        if self._admin_tls is not None:
            self._admin_tls.update(self.config_rollout.running.config.listeners.admin.tls)
        self.auto.on_applied(trigger)
        self.drift.configure(self.config_rollout.running.config, time())
        await self._trial.on_applied(trigger)

    def ready_workers(self) -> list[Worker]:
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        return sorted(
            (worker for worker in workers if worker.ready_at is not None),
            key=lambda worker: worker.started_at,
        )

    def ending_workers(self) -> list[Worker]:
        """Return the replaced worker processes that still finish their requests."""
        return list(self._ending)

    async def start(self) -> None:
        """Start all worker processes and the admin server.

        Raises OSError if an address is in use, and RuntimeError if a worker does not become ready.
        """
        await self._hub.start()
        api = self.config_rollout.running.config.listeners.api
        admin = self.config_rollout.running.config.listeners.admin
        port, inherited = api.port, self._sockets.get(API)
        for number in range(self.worker_count):
            with naming_config_key("listeners.api", api.host, api.port):
                listener = (
                    new_listener(api.host, port)
                    if inherited is None
                    else make_inheritable(inherited[0].dup())
                )
            port = listener.getsockname()[1]
            self._slots.append(WorkerSlot(number, listener))
        self.url = http_url(api.host, port, encrypted=api.tls is not None)
        async with self.config_rollout.lock:
            await self._start_all()
        for slot in self._slots:
            slot.task = asyncio.create_task(
                self._keep_running(slot), name=f"look after worker {slot.number}"
            )
        self._runner = web.AppRunner(admin_server.workers_application(self), access_log=None)
        await self._runner.setup()
        with naming_config_key("listeners.admin", admin.host, admin.port):
            await self._listen_admin(self._runner, admin)
        await self._follow.start()
        self._trial.start()
        self.auto.start()
        self._drift_collector.start()

    async def _listen_admin(self, runner: web.AppRunner, admin: AdminListener) -> None:
        sockets = self._sockets.get(ADMIN) or bind(admin.host, admin.port)
        limit_send_buffers(sockets, self.config_rollout.running.config.limits.send_buffer)
        limit_receive_buffers(sockets, ADMIN_RECEIVE_BUFFER)
        self.admin_url = http_url(
            admin.host, sockets[0].getsockname()[1], encrypted=admin.tls is not None
        )
        if admin.tls is None:
            for listener in sockets:
                await web.SockSite(runner, listener).start()
            return
        assert runner.server is not None
        close_s = self.config_rollout.running.config.limits.slow_reader
        self._admin_tls = TlsListener(admin.tls, runner.server, close_s, lambda: None)
        loop = asyncio.get_running_loop()
        self._admin_servers = [
            await loop.create_server(self._admin_tls.new_handshake, sock=listener)
            for listener in sockets
        ]

    async def _start_all(self) -> None:
        # Start the first worker, which determines the version number, then the others.
        #
        # Raises RuntimeError when a worker does not become ready.
        first, *others = self._slots
        workers = [await self._start_worker(first, finds_version=True)]
        if workers[0] is not None:
            self.config_rollout.set_version_number(
                json.loads((await workers[0].request("GET", "/config")).body)["version"]
            )
            workers += await asyncio.gather(*(self._start_worker(slot) for slot in others))
        if not all(workers):
            raise RuntimeError(
                "a worker process did not become ready; its log messages above give the reason"
            )

    async def stop_being_ready(self) -> None:
        """Report this gateway as not ready, but serve requests for `timeouts.grace` more seconds.

        Load balancers need this time to notice the change.
        """
        self.is_draining = True
        grace_s = self.config_rollout.running.config.timeouts.grace or 0.0
        log.info(
            "SIGTERM received: readiness checks fail from now on; requests are served for %g "
            "more seconds (timeouts.grace)",
            grace_s,
        )
        await asyncio.sleep(grace_s)

    async def stop(self) -> None:
        """Let all workers end their requests, stop the workers, then stop the admin server."""
        started_at, self.is_draining = monotonic(), True
        log.info(
            "drain begins: %d worker processes finish their requests", len(self.ready_workers())
        )
        await self._follow.stop()
        await self._trial.stop()
        await self.auto.stop()
        await self._drift_collector.stop()
        for task in (*self._rolls, *(slot.task for slot in self._slots)):
            if task is not None:
                task.cancel()
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for worker in (*workers, *self._ending):
            worker.drain()
        await asyncio.gather(
            *(worker.wait_until_ended(self._drain_s()) for worker in workers),
            *self._ending.values(),
        )
        if self._runner is not None:
            await self._runner.cleanup()
        for server in self._admin_servers:
            server.close()
        await self._hub.stop()
        for slot in self._slots:
            slot.listener.close()
        self._folder.cleanup()
        log.info("drain ended after %.1f s; the gateway stops", monotonic() - started_at)

    async def on_hangup(self) -> None:
        """Handle SIGHUP: make workers reopen the access log, and reload the configuration."""
        for worker in (*self.ready_workers(), *self.ending_workers()):
            worker.reopen_log()
        systemd_notify.report_reloading(self._env)
        try:
            await self.config_rollout.reload()
        finally:
            systemd_notify.report_ready(self._env)

    async def replace_workers(self) -> None:
        """Replace the workers one by one; a new one is ready before the old one stops accepting."""
        async with self._rolling:
            for slot in self._slots:
                await self._renew(slot)
        log.warning("all %d worker processes have been replaced", self.worker_count)

    def _on_worker_lost(self, worker: Worker) -> None:
        async def renew() -> None:
            async with self._rolling:
                for slot in self._slots:
                    if slot.worker is worker:
                        await self._renew(slot)

        task = asyncio.create_task(renew(), name=f"replace worker {worker.number}")
        self._rolls.add(task)
        task.add_done_callback(self._rolls.discard)

    async def _renew(self, slot: WorkerSlot) -> None:
        old = slot.worker
        if slot.task is not None:
            slot.task.cancel()
            await asyncio.gather(slot.task, return_exceptions=True)
        if await self._replace(slot) is None:
            log.error("worker %d cannot be replaced; the old process continues", slot.number)
            slot.worker = old
        elif old is not None:
            self._retire(old)
        slot.task = asyncio.create_task(
            self._keep_running(slot), name=f"look after worker {slot.number}"
        )

    def _retire(self, worker: Worker) -> None:
        # Make a worker end with its last connection, and kill it after a timeout.
        worker.retire()
        within_s = self.config_rollout.running.config.timeouts.handover + self._drain_s()
        task = asyncio.create_task(
            worker.wait_until_ended(within_s), name=f"drain worker {worker.number}"
        )
        self._ending[worker] = task
        task.add_done_callback(lambda _: self._ending.pop(worker, None))

    def _drain_s(self) -> float:
        return self.config_rollout.running.config.timeouts.shutdown + DRAIN_MARGIN_S

    async def _start_worker(
        self, slot: WorkerSlot, *, finds_version: bool = False
    ) -> Worker | None:
        # Start a worker in this slot; return it once it is ready, or None if it does not start.
        #
        # A caller that is cancelled meanwhile leaves no process behind.
        running, file = self.config_rollout.running, self.config_rollout.file
        self._started += 1
        own_values = WorkerSettings(
            str(self._path("hub")),
            self._secret,
            slot.number,
            str(self._path(f"admin-{self._started}")),
            None if finds_version else self.config_rollout.version,
            await self._drained(),
        )
        settings = WorkerLaunchSettings(
            own_values,
            running.file,
            running.text,
            slot.listener.fileno(),
            None if file is None else str(file),
        )
        try:
            worker = await Worker.start(settings, slot.listener)
        except OSError as error:
            # The system is out of memory, processes or descriptors; a later attempt may succeed.
            log.error("worker %d cannot be started: %s", slot.number, error)
            return None
        is_ready = False
        try:
            is_ready = await worker.wait_until_ready()
        finally:
            if not is_ready:
                await worker.wait_until_ended(0.0)
        if is_ready:
            slot.worker = worker
        return worker if is_ready else None

    async def _drained(self) -> tuple[str, ...]:
        # Return the names of endpoints that an operator has drained.
        #
        # The oldest ready worker reports them.
        response = await admin_server.first_response(self.ready_workers(), "/endpoints")
        rows = json.loads(response.body)["endpoints"] if response.status == 200 else ()
        return tuple(row["name"] for row in rows if row["state"] in DRAINED_STATES)

    async def _replace(self, slot: WorkerSlot) -> Worker | None:
        async with self.config_rollout.lock:
            return await self._start_worker(slot)

    async def _keep_running(self, slot: WorkerSlot) -> None:
        while True:
            worker = slot.worker
            if worker is not None:
                code = await worker.process.wait()
                slot.worker = None
                await worker.close()
                self.metrics.deaths_total.inc()
                if worker.ready_at is not None and monotonic() - worker.ready_at > STABLE_AFTER_S:
                    slot.retry_s = MIN_RETRY_S
                log.error(
                    "worker %d ended (status %s); it is restarted in %.1f s",
                    slot.number,
                    code,
                    slot.retry_s,
                )
            await asyncio.sleep(slot.retry_s)
            slot.retry_s = min(MAX_RETRY_S, 2 * slot.retry_s)
            if await self._replace(slot) is not None:
                log.warning("worker %d serves again", slot.number)

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name


def run_workers(
    loaded: LoadedConfig,
    file: Path | None,
    env: Mapping[str, str],
    report_line: ReportLine,
    count: int,
    ready: Callable[[Supervisor], None],
    sockets: SocketsByName = NO_SOCKETS,
    predecessor: Predecessor | None = None,
) -> int:
    """Run the workers until SIGINT or SIGTERM, and return the exit code.

    SIGHUP reloads the configuration file. SIGUSR2 replaces the workers.
    """
    return asyncio.run(
        _run(Supervisor(loaded, file, env, report_line, count, sockets), ready, env, predecessor)
    )


def _handle_signals(
    supervisor: Supervisor,
    stopping: asyncio.Event,
    tasks: set[asyncio.Task[Any]],
    signals: set[signal.Signals],
) -> None:
    # Start a task in `tasks` for SIGHUP and SIGUSR2; SIGINT and SIGTERM set `stopping`.
    loop = asyncio.get_running_loop()

    def start_task(work: Any) -> None:
        task = loop.create_task(work())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def on_stop_signal(number: signal.Signals) -> None:
        signals.add(number)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop_signal, number)
    loop.add_signal_handler(signal.SIGHUP, start_task, supervisor.on_hangup)
    loop.add_signal_handler(signal.SIGUSR2, start_task, supervisor.replace_workers)


async def _run(
    supervisor: Supervisor,
    ready: Callable[[Supervisor], None],
    env: Mapping[str, str],
    predecessor: Predecessor | None,
) -> int:
    stopping = asyncio.Event()
    tasks: set[asyncio.Task[Any]] = set()
    signals: set[signal.Signals] = set()
    _handle_signals(supervisor, stopping, tasks, signals)
    try:
        await supervisor.start()
        ready(supervisor)
        if predecessor is None:
            systemd_notify.report_ready(env)
        else:
            await predecessor.decline_state()
            await predecessor.report_ready()
        await stopping.wait()
        systemd_notify.report_stopping(env)
        # Only SIGTERM waits for load balancers; after Ctrl-C there is no need to.
        if signal.SIGTERM in signals:
            await supervisor.stop_being_ready()
    except (OSError, RuntimeError) as error:
        log.error("the gateway cannot serve: %s", error)
        return 1
    finally:
        for task in tasks:
            task.cancel()
        with suppress(ProcessLookupError):
            await supervisor.stop()
        if predecessor is not None:
            await predecessor.stop(supervisor.config_rollout.running.config.timeouts.shutdown)
    return 0
