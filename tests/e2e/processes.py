"""Runs a gateway or mock engines as real processes, on free ports of 127.0.0.1.

This module starts a process, waits until it is ready, records its stderr, and ends it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.long_timeouts import PATIENT

ROOT = Path(__file__).parents[2]
WITHIN_S = 60.0
# A leaked process is killed after this time. Module-scoped fixtures live long on a slow machine.
AT_MOST_S = 900.0
FILE = "gateway.yaml"
# The source tree whose gateway runs. `make test-compiled` sets another one.
HOME = os.environ.get("PENSTOCK_HOME", str(ROOT))
# The modules of tests and benchmarks are in ROOT, and not in an installed wheel.
PATHS = os.pathsep.join((HOME, str(ROOT)))
ENV = os.environ | {"PYTHONPATH": PATHS, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
PATIENCE = "".join(f"{name}: {json.dumps(PATIENT[name])}\n" for name in ("health", "scrape"))
_READY = re.compile(r"API at (https?://\S+)/v1, admin server at (https?://[^\s;]+)")


class GatewayProcess:
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
    def stderr_text(self) -> str:
        return "".join(self._lines)

    def drop_lines(self, text: str) -> None:
        self._lines[:] = [line for line in self._lines if text not in line]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        # Wait until the process has ended and its stderr is read; return the exit code.
        code = self._process.wait(WITHIN_S)
        if self._reader is not None:
            self._reader.join(WITHIN_S)
        return code

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def read_until_ready(self, stderr: IO[str]) -> None:
        # Read stderr until the process prints its URLs, then keep reading in a thread.
        for line in stderr:
            self._lines.append(line)
            match = _READY.search(line)
            if match:
                self.url, self.admin_url = match[1], match[2]
                self._reader = threading.Thread(
                    target=self._lines.extend, args=(stderr,), daemon=True
                )
                self._reader.start()
                return
        raise AssertionError(f"the gateway exited before it listened:  {self.stderr_text}")


def complete_config(config: str, observability: str = "{access_log: 'off'}") -> str:
    listeners = "listeners: {api: {port: 0}, admin: {port: 0}}"
    return f"version: 1\n{listeners}\nobservability: {observability}\n{config}"


@contextmanager
def gateway_process(
    folder: Path,
    config: str,
    patience: str = PATIENCE,
    observability: str = "{access_log: 'off'}",
    complete: bool = True,
    **env: str,
) -> Iterator[GatewayProcess]:
    # Run a gateway with this YAML configuration, written to `folder / FILE`.
    #
    # complete    whether to add the parts that all these tests share
    # patience    YAML with long health and scrape timeouts; "" for the default ones
    # env         additional environment variables
    file = folder / FILE
    file.write_text((complete_config(config, observability) if complete else config) + patience)
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    with run_process(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV | env
    ) as process:
        assert process.stderr
        started = GatewayProcess(process)
        started.read_until_ready(process.stderr)
        yield started


@contextmanager
def mock_fleet(*options: str) -> Iterator[list[str]]:
    # Run two mock engines and yield their URLs.
    #
    # They simulate no delays unless `options` override that.
    command = [
        sys.executable,
        "-m",
        "mockgpu",
        "--port",
        "0",
        "--groups",
        "2",
        "--speed",
        "inf",
        "--json",
        *options,
    ]
    with run_process(command, stdout=subprocess.PIPE, env=ENV) as process:
        assert process.stdout
        yield [json.loads(process.stdout.readline())["ready"] for _ in range(2)]


@contextmanager
def run_process(command: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **options) as process:  # type: ignore[call-overload]
        watchdog = threading.Timer(AT_MOST_S, kill_leaked, (process, AT_MOST_S))
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


def kill_leaked(process: subprocess.Popen[str], after_s: float) -> None:
    name = shlex.join(map(str, process.args))  # type: ignore[arg-type]
    print(f"killed after {after_s:g} s, the limit of a test: {name}", file=sys.stderr, flush=True)
    process.kill()
