"""Real processes for the end-to-end tests: a gateway or a mock fleet on free ports of 127.0.0.1, ended by their pid.

Lives here: starting, hearing that it is ready, keeping what it said on stderr. Not here: what is asked of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.patient import PATIENT

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0
# A process that a test has lost ends after this; fixtures of a whole module live long on a slow machine.
AT_MOST_S = 900.0
FILE = "gateway.yaml"
HOME = os.environ.get("PENSTOCK_HOME", str(ROOT))  # whose gateway: `make test-compiled` has another
ENV = os.environ | {"PYTHONPATH": HOME, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
PATIENCE = "".join(f"{name}: {json.dumps(PATIENT[name])}\n" for name in ("health", "scrape"))
_READY = re.compile(r"API (https?://\S+)/v1, admin (https?://[^\s;]+)")


class Gateway:
    """A running gateway process: its two URLs, its pid and every line it wrote to stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None
        self.url = self.admin_url = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        return "".join(self._lines)

    def forget(self, text: str) -> None:
        """Drop the lines with this text from what it said."""
        self._lines[:] = [line for line in self._lines if text not in line]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """The exit code, once the process has ended and all that it said was read."""
        code = self._process.wait(WITHIN_S)
        if self._reader is not None:
            self._reader.join(WITHIN_S)
        return code

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def hear(self, stderr: IO[str]) -> None:
        """Read until it says where it listens; a thread goes on listening."""
        for line in stderr:
            self._lines.append(line)
            found = _READY.search(line)
            if found:
                self.url, self.admin_url = found[1], found[2]
                self._reader = threading.Thread(target=self._lines.extend, args=(stderr,), daemon=True)
                self._reader.start()
                return
        raise AssertionError(f"the gateway ended before it listened: {self.said}")


def whole(config: str, observability: str = "{access_log: 'off'}") -> str:
    """The text of a configuration file: what all of them here have in common, and this."""
    listeners = "listeners: {api: {port: 0}, admin: {port: 0}}"
    return f"version: 1\n{listeners}\nobservability: {observability}\n{config}"


@contextmanager
def gateway(
    folder: Path,
    config: str,
    patience: str = PATIENCE,
    observability: str = "{access_log: 'off'}",
    complete: bool = True,
    **env: str,
) -> Iterator[Gateway]:
    """A gateway with this configuration (YAML, made whole where `complete`) in `folder / FILE` until the block is left.
    `patience` is how it looks after engines: as shipped, if that is empty."""
    file = folder / FILE
    file.write_text((whole(config, observability) if complete else config) + patience)
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    with running(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV | env) as process:
        assert process.stderr
        started = Gateway(process)
        started.hear(process.stderr)
        yield started


@contextmanager
def mock_fleet(*options: str) -> Iterator[list[str]]:
    """The URLs of mock TP groups, two and without any waiting unless told otherwise."""
    command = [sys.executable, "-m", "mockgpu", "--port", "0", "--groups", "2", "--speed", "inf", "--json", *options]
    with running(command, stdout=subprocess.PIPE, env=ENV) as process:
        assert process.stdout
        yield [json.loads(process.stdout.readline())["ready"] for _ in range(2)]


@contextmanager
def running(command: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **options) as process:  # type: ignore[call-overload]
        watchdog = threading.Timer(AT_MOST_S, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.terminate()
            try:
                process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
