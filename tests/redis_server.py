"""A private Redis server for tests, on an unused port with an empty folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.duration_limits import PATIENCE_S
from tests.ports import free_port

WITHOUT = "PENSTOCK_TESTS_WITHOUT_REDIS"


class RedisServer:
    """A Redis server that can be stopped, suspended and restarted on its port.

    When it is stopped, its data is lost.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def start(self) -> None:
        options = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command = [self._program, *options, "--dir", str(self._folder), "--daemonize", "no"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ends = monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server exited before it answered"
            assert monotonic() < ends, "redis-server did not answer in time"
            sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16) == b"+PONG\r\n"
        except OSError:
            return False


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    program = shutil.which("redis-server")
    if program is None:
        message = (
            "redis-server is not installed (apt-get install redis-server); "
            f"{WITHOUT}=1 skips these tests"
        )
        if os.environ.get(WITHOUT):
            pytest.skip(message)
        pytest.fail(message)
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(program, Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()
