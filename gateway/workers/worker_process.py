"""One worker as its supervisor sees it: a process, its admin socket, since when it is ready."""

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
from gateway.workers.settings import Settings, packed

READY_WITHIN_S = 60.0
ASK_S = 30.0
LOST = (aiohttp.ClientError, OSError, TimeoutError)


class Answer:
    """What a worker's admin server said."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class Worker:
    """A process that was started. `ready_at` is None until it serves."""

    def __init__(self, settings: Settings, process: asyncio.subprocess.Process) -> None:
        self.number = settings.number
        self.process = process
        self.started_at = monotonic()
        self.ready_at: float | None = None
        self._admin = Path(settings.admin)
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(settings.admin))

    @classmethod
    async def start(cls, settings: Settings, listener: socket.socket) -> Worker:
        """A new process; it inherits the listening socket and nothing else. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gateway.workers.worker_main"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # Ctrl-C is the supervisor's to hear
        )
        assert process.stdin is not None
        process.stdin.write(packed(settings))
        return cls(settings, process)

    async def becomes_ready(self) -> bool:
        """Whether it came to serve. It answers on its admin socket only once it listens."""
        ends = monotonic() + READY_WITHIN_S
        while self.process.returncode is None and monotonic() < ends:
            try:
                if (await self.ask("GET", "/healthz", timeout_s=2.0)).status == 200:
                    self.ready_at = monotonic()
                    return True
            except LOST:
                await asyncio.sleep(0.02)
        return False

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = ASK_S,
    ) -> Answer:
        """Raises one of LOST."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        asked: Any = self._session.request(
            method, f"http://localhost{path}", data=body, headers=headers, timeout=timeout
        )
        async with asked as answer:
            return Answer(answer.status, dict(answer.headers), await answer.read())

    def drain(self) -> None:
        """Accept nothing new at once, end when the running answers have: whatever grace there is, all had together."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)

    def retire(self) -> None:
        """Another worker has its socket: accept nothing new, end when its connections have."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGUSR2)

    def hang_up(self) -> None:
        """Have it reopen the access log."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGHUP)

    async def gone(self, within_s: float) -> None:
        """Wait for its end; it is killed when that takes too long."""
        try:
            async with asyncio.timeout(within_s):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self.close()

    async def close(self) -> None:
        """What is left of one that ended."""
        await self._session.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._admin.unlink(missing_ok=True)


def listening(host: str, port: int) -> socket.socket:
    """A socket of the API port, one of several; it stays open when its worker ends: who connected waits on."""
    made, *others = bind(host, port, reuse_port=True)
    for each in others:  # a worker listens on one address
        each.close()
    return inheritable(made)


def inheritable(given: socket.socket) -> socket.socket:
    """The socket, for a worker to inherit."""
    os.set_inheritable(given.fileno(), True)
    return given
