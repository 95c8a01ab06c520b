"""A worker in its supervisor's view: a process, its admin socket, and when it became ready."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from gateway.http.listener_sockets import bind
from gateway.restart.worker_launch_settings import WorkerLaunchSettings, pack_settings

READY_TIMEOUT_S = 60.0  # time to become ready, not counting the worker's waits for a CPU core
REQUEST_TIMEOUT_S = 30.0
REQUEST_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class WorkerResponse:
    """A response of a worker's admin server: HTTP status, headers and body."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class Worker:
    """A worker process that this supervisor has started.

    `ready_at` is None until the worker accepts connections.
    """

    def __init__(self, settings: WorkerLaunchSettings, process: asyncio.subprocess.Process) -> None:
        self.number = settings.worker.number
        self.process = process
        self.started_at = monotonic()
        self.ready_at: float | None = None
        self._admin = Path(settings.worker.admin)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(settings.worker.admin)
        )

    @classmethod
    async def start(cls, settings: WorkerLaunchSettings, listener: socket.socket) -> Worker:
        """Start a worker process, which inherits only the listening socket.

        Raises OSError if the process cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gateway.workers.worker_main"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # so that Ctrl-C reaches only the supervisor
        )
        assert process.stdin is not None
        process.stdin.write(pack_settings(settings))
        return cls(settings, process)

    async def wait_until_ready(self) -> bool:
        """Wait until the worker accepts connections; return False if it ends or takes too long.

        A worker is ready once its admin socket responds. Time in which the process waits for a CPU
        does not count, because a restarted worker would have to wait as well.
        """
        deadline = monotonic() + READY_TIMEOUT_S
        while (
            self.process.returncode is None
            and monotonic() - seconds_without_cpu(self.process.pid) < deadline
        ):
            try:
                if (await self.request("GET", "/healthz", timeout_s=2.0)).status == 200:
                    self.ready_at = monotonic()
                    return True
            except REQUEST_ERRORS:
                await asyncio.sleep(0.02)
        return False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> WorkerResponse:
        """Send a request to the worker's admin server and return the response.

        method     HTTP method
        path       path with the query
        body       request body
        headers    further header fields
        timeout_s  seconds within which the whole response must arrive

        Raises one of the exceptions in REQUEST_ERRORS if there is no response.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        request: Any = self._session.request(
            method, f"http://localhost{path}", data=body, headers=headers, timeout=timeout
        )
        async with request as response:
            return WorkerResponse(response.status, dict(response.headers), await response.read())

    def drain(self) -> None:
        """Make the worker stop accepting connections, and exit after its current responses.

        It skips the grace period, because all workers have already waited for that together.
        """
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)

    def retire(self) -> None:
        """Make the worker stop accepting connections, and exit once its connections have ended.

        Call this when another worker has its listening socket.
        """
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGUSR2)

    def reopen_log(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGHUP)

    async def wait_until_ended(self, within_s: float) -> None:
        """Wait until the worker process has ended; kill it after `within_s` seconds."""
        try:
            async with asyncio.timeout(within_s):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self.close()

    async def close(self) -> None:
        """Close the supervisor's connections to a worker that has ended."""
        await self._session.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._admin.unlink(missing_ok=True)


def new_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket on the API port, which workers share through SO_REUSEPORT.

    It stays open when its worker ends. Therefore clients that have connected have to wait, but are
    not refused.
    """
    listener, *others = bind(host, port, reuse_port=True)
    for other in others:  # a worker listens on one address
        other.close()
    return make_inheritable(listener)


def make_inheritable(listener: socket.socket) -> socket.socket:
    os.set_inheritable(listener.fileno(), True)
    return listener


def seconds_without_cpu(pid: int) -> float:
    """Return how many seconds the main thread of a process has waited for a CPU.

    Linux counts this time. Elsewhere, the result is 0.
    """
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
        return int(fields[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
