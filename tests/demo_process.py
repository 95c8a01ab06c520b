"""Starts an installed `penstock demo` for tests, sends it a request, and ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.duration_limits import pace
from tests.ports import free_port

START_S = 60.0


@dataclass(frozen=True)
class Demo:
    url: str
    output: str
    started: float

    def ask(self) -> str:
        body = {"model": "demo-8b", "messages": [{"role": "user", "content": "Why gates?"}]}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body | {"max_tokens": 8}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: str = json.load(answer)["choices"][0]["message"]["content"]
        return content

    def age_s(self) -> float:
        # Return the seconds since the demo was started.
        return time.monotonic() - self.started


@contextmanager
def started_demo(command: Callable[..., list[str]], folder: Path | None = None) -> Iterator[Demo]:
    # Run a demo during a `with` block; `command` returns the command line for given arguments.
    #
    # The command leads its own process group, which is ended afterwards.
    port, admin_port = free_port(), free_port()
    arguments = command("penstock", "demo", "--port", str(port), "--admin-port", str(admin_port))
    started = time.monotonic()
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, cwd=folder, start_new_session=True
    ) as process:
        assert process.stdout is not None
        late = threading.Timer(START_S * pace(), os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if "Try it" in line:
                    break
            late.cancel()
            yield Demo(f"http://127.0.0.1:{port}", "".join(lines), started)
        finally:
            late.cancel()
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
