"""The life of one gateway process: signals, shutdown, and handover to a successor.

    SIGTERM   not ready for timeouts.grace, then drain and exit
    SIGINT    drain and exit
    SIGHUP    reopen the access log and reload the configuration
    SIGUSR2   restart without refusing a connection

In a worker, SIGUSR2 only drains: its supervisor sends it once another worker has the listening
socket.
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

from gateway.app import App, Origin
from gateway.restart import notify
from gateway.restart.learned_state import booked, collect
from gateway.restart.successor import HandoverError, Successor

log = logging.getLogger("penstock")


def run(
    origin: Origin, ready: Callable[[App], None] | None = None, *, hangup_reloads: bool = True
) -> int:
    """Run a gateway until SIGINT or SIGTERM and return the exit code.

    `ready` is called once it listens. With `hangup_reloads` false, SIGHUP keeps its default action,
    as a program in a terminal needs; a worker only reopens its access log.
    """
    return uvloop.run(_run(origin, ready, hangup_reloads=hangup_reloads))


async def _run(origin: Origin, ready: Callable[[App], None] | None, *, hangup_reloads: bool) -> int:
    try:
        app = App(origin.loaded.config, origin)
    except OSError as error:
        log.error("cannot start: observability.access_log: %s", error)
        return 1
    process = _Process(app, origin)
    process.follow_signals(hangup_reloads=hangup_reloads)
    try:
        await app.start()
        if ready is not None:
            ready(app)
        if origin.predecessor is None:
            notify.ready(origin.env)
        await process.until_end()
    except OSError as error:
        log.error("cannot listen: %s", error)
        return 1
    finally:
        await process.end()
    return 0


class _Process:
    """The signal handlers of a gateway process, and the tasks they start."""

    def __init__(self, app: App, origin: Origin) -> None:
        self._app = app
        self._env = origin.env
        self._is_worker = origin.local is not None
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._is_terminated = self._is_restarting = False
        self._successor: Successor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        app.end = self._ending.set

    def follow_signals(self, *, hangup_reloads: bool) -> None:
        """Install the signal handlers of this process."""
        add = self._loop.add_signal_handler
        add(signal.SIGINT, self._ending.set)
        add(signal.SIGTERM, self._terminate)
        if self._is_worker:
            add(signal.SIGHUP, self._app.reopen_log)
            add(signal.SIGUSR2, self._start_task, self._retire)
        elif hangup_reloads:
            add(signal.SIGHUP, self._start_task, self._on_hangup)
            add(signal.SIGUSR2, self._start_task, self._restart)

    async def until_end(self) -> None:
        """Return when the process should end.

        That is after SIGINT, after the grace period of SIGTERM, or when a successor serves all
        clients.
        """
        await self._ending.wait()
        if self._successor is not None:
            return
        notify.stopping(self._env)
        # Only SIGTERM waits for load balancers; after Ctrl-C there is no need to.
        if self._is_terminated:
            await self._app.recede()

    async def end(self) -> None:
        """Stop the application, after a handover or a drain."""
        for task in self._tasks:
            task.cancel()
        await self._app.stop()
        if self._successor is not None:
            self._successor.close()

    def _terminate(self) -> None:
        self._is_terminated = True
        self._ending.set()

    def _start_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_hangup(self) -> None:
        self._app.reopen_log()
        if self._successor is not None:  # the successor owns the configuration now
            return
        notify.reloading(self._env)
        try:
            await self._app.reloader.reload("signal")
        finally:
            notify.ready(self._env)

    async def _retire(self) -> None:
        await self._app.retire()
        self._ending.set()

    async def _restart(self) -> None:
        if self._is_restarting or self._ending.is_set():
            log.warning("SIGUSR2: ignored, because this process is already restarting or stopping")
            return
        if os.getpid() == 1:
            log.error(
                "SIGUSR2: ignored in process 1, because the container ends with it; "
                "replace the container instead"
            )
            return
        self._is_restarting = True
        try:
            await self._hand_over()
        finally:
            self._is_restarting = False

    async def _hand_over(self) -> None:
        app = self._app
        log.info("SIGUSR2: starting a successor")
        successor = Successor(self._env, app.bound, app.secret)
        try:
            await successor.start(app.config.prefix.block_bytes, partial(collect, app.gateway))
        except HandoverError as error:
            log.error("restart failed: %s; this process continues", error)
            return
        self._successor = successor
        log.info("the successor (pid %d) accepts connections", successor.pid)
        async with successor.informed(partial(booked, app.gateway), self._ending.set):
            await self._retire()
