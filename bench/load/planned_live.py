"""Runs a planned fleet on virtual time: gateway, mock engines and client in one process.

    python -m bench.load.planned_live FOLDER

`make planned` starts it. FOLDER contains:

gateway.yaml   configuration of the gateway, written by `penstock size`
mock.txt       command that starts the mock engines
client.json    requests that the client sends
records.json   is written: what the client recorded

Client, gateway and engines are connected by sockets of 127.0.0.1. The clock jumps to the next timer
whenever there is nothing to do. So the recorded times consist of the engines' simulated times and
the gateway's timers, and do not depend on this machine.
"""

from __future__ import annotations

import time

from bench.virtual_loop import VirtualLoop

CLOCK = VirtualLoop()
# before other modules import them
time.monotonic, time.time, time.perf_counter = CLOCK.time, CLOCK.wall_time, CLOCK.time

import asyncio  # noqa: E402
import os  # noqa: E402
import shlex  # noqa: E402
import sys  # noqa: E402
from collections.abc import Coroutine  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from unittest.mock import patch  # noqa: E402

import msgspec  # noqa: E402

from command_line import run_command  # noqa: E402
from gateway.app import App  # noqa: E402
from gateway.config import load_with_warnings  # noqa: E402
from gateway.http.listener_sockets import LISTENER_NAMES, bind  # noqa: E402
from gateway.restart.start_options import StartOptions  # noqa: E402
from mockgpu.cli import mock  # noqa: E402
from planner.bench import BenchPlan, run  # noqa: E402

START_S = 3.0
"""Virtual seconds until the engines listen and the gateway has probed them."""


def mock_engines(command: str) -> Coroutine[Any, Any, None]:
    """Return a coroutine that runs the mock engines of a `penstock mock` command."""
    served: list[Coroutine[Any, Any, None]] = []
    with patch("mockgpu.cli.uvloop.run", served.append), suppress(SystemExit):
        run_command(mock, shlex.split(command)[2:], "penstock mock", os.environ)
    return served[0]


async def serve_and_send(folder: Path) -> None:
    """Start the planned fleet, send it the requests, and write the client's records to a file."""
    written = Path(folder, "client.json").read_bytes()
    plan = msgspec.json.decode(written, type=BenchPlan, dec_hook=lambda kind, text: kind(text))
    engines = asyncio.create_task(mock_engines(Path(folder, "mock.txt").read_text()))
    await asyncio.sleep(START_S)
    file = Path(folder, "gateway.yaml")
    loaded = load_with_warnings(file, os.environ)
    # Free ports, as if systemd had opened the sockets: the file stays as it was emitted.
    sockets = {name: bind("127.0.0.1", 0) for name in LISTENER_NAMES}
    origin = StartOptions(
        loaded, file, os.environ, sockets=sockets, activated=frozenset(LISTENER_NAMES)
    )
    app = App(loaded.config, origin)
    await app.start()
    try:
        await asyncio.sleep(START_S)
        report = await run(msgspec.structs.replace(plan, url=app.url))
        Path(folder, "records.json").write_bytes(msgspec.json.encode(report.records))
    finally:
        await app.stop()
        engines.cancel()


if __name__ == "__main__":
    asyncio.set_event_loop(CLOCK)
    CLOCK.run_until_complete(serve_and_send(Path(sys.argv[1])))
