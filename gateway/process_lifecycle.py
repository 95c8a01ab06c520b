"""The life of one gateway process: its start, its signals, its restart and its end.

    SIGTERM   report not ready for timeouts.grace seconds, then drain and end
    SIGINT    drain and end
    SIGHUP    reopen the access log and reload the configuration
    SIGUSR2   restart without refusing a request

To drain means to accept no more requests and to finish those that run. In a worker process, SIGUSR2
only drains: its supervisor sends the signal once another worker listens on the socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import uvloop

from gateway.app import App
from gateway.restart import systemd_notify
from gateway.restart.learned_state import collect_state, remaining_work
from gateway.restart.old_process_side import HandoverError, Successor
from gateway.restart.start_options import StartOptions
from gateway.util.file_descriptors import reserve_descriptors

log = logging.getLogger("penstock")


def run_gateway(
    origin: StartOptions, ready: Callable[[App], None] | None = None, *, hangup_reloads: bool = True
) -> int:
    """Run a gateway until it receives a signal to stop, and return its exit code.

    origin          where the configuration comes from
    ready           function that is called once the gateway listens
    hangup_reloads  whether SIGHUP reloads the configuration. If False, SIGHUP ends the process, as
                    usual for a program in a terminal; in a worker, it only reopens the access log
    """
    reserve_descriptors()
    return uvloop.run(_run(origin, ready, hangup_reloads=hangup_reloads))


async def _run(
    origin: StartOptions, ready: Callable[[App], None] | None, *, hangup_reloads: bool
) -> int:
    try:
        app = App(origin.loaded.config, origin)
    except OSError as error:
        log.error("the gateway cannot start: observability.access_log: %s", error)
        return 1
    process = _Process(app, origin)
    process.follow_signals(hangup_reloads=hangup_reloads)
    try:
        await app.start()
        if ready is not None:
            ready(app)
        if origin.predecessor is None:
            systemd_notify.report_ready(origin.env)
        await process.until_end()
    except OSError as error:
        log.error("the gateway cannot start: %s", error)
        return 1
    finally:
        await process.end()
    return 0


class _Process:
    def __init__(self, app: App, origin: StartOptions) -> None:
        self._app = app
        self._env = origin.env
        self._is_worker = origin.local is not None
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._terminated = self._restarting = False
        self._successor: Successor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        app.request_end = self._ending.set

    def follow_signals(self, *, hangup_reloads: bool) -> None:
        add = self._loop.add_signal_handler
        add(signal.SIGINT, self._ending.set)
        add(signal.SIGTERM, self._terminate)
        if self._is_worker:
            add(signal.SIGHUP, self._app.reopen_log)
            add(signal.SIGUSR2, self._begin, self._retire)
        elif hangup_reloads:
            add(signal.SIGHUP, self._begin, self._handle_sighup)
            add(signal.SIGUSR2, self._begin, self._restart)

    async def until_end(self) -> None:
        # Return when the process has to end: after the grace period of SIGTERM, or once a successor
        # serves all clients.
        await self._ending.wait()
        if self._successor is not None:
            return
        systemd_notify.report_stopping(self._env)
        # SIGTERM comes from an orchestrator, whose load balancer needs time to notice. After
        # SIGINT, from a terminal, there is nothing to wait for.
        if self._terminated:
            await self._app.stop_being_ready()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._app.stop()
        if self._successor is not None:
            self._successor.close()

    def _terminate(self) -> None:
        self._terminated = True
        self._ending.set()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle_sighup(self) -> None:
        self._app.reopen_log()
        if self._successor is not None:
            return  # the successor owns the configuration now
        systemd_notify.report_reloading(self._env)
        try:
            await self._app.reloader.reload("signal")
        finally:
            systemd_notify.report_ready(self._env)

    async def _retire(self) -> None:
        await self._app.retire()
        self._ending.set()

    async def _restart(self) -> None:
        if self._restarting or self._ending.is_set():
            log.warning("SIGUSR2 ignored: this process is already restarting or ending")
            return
        if os.getpid() == 1:
            log.error(
                "SIGUSR2 ignored: the process has pid 1, and its end would end the container; "
                "replace the container instead"
            )
            return
        self._restarting = True
        try:
            await self._hand_over()
        finally:
            self._restarting = False

    async def _hand_over(self) -> None:
        app = self._app
        log.info("SIGUSR2 received: starting a successor process")
        successor = Successor(self._env, app.bound, app.secret)
        try:
            await successor.start(
                app.config.prefix.block_bytes, partial(collect_state, app.gateway, app.drift)
            )
        except HandoverError as error:
            log.error("the restart failed: %s. This process continues to serve.", error)
            return
        self._successor = successor
        log.info("the successor process (pid %d) accepts connections now", successor.pid)
        async with successor.keep_informed(partial(remaining_work, app.gateway), self._ending.set):
            await self._retire()
