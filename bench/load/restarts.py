"""Checks that restarting a gateway under load loses no request and cuts no stream.

    python -m bench.load.restarts [--restarts 10] [--streams 40] [--shorts 4]
                                  [--only sigusr2|socket|workers]

There are three modes, each with ten restarts:

sigusr2   a gateway that opens its own sockets and hands them to its successor
socket    a gateway that gets its sockets from systemd-socket-activate
workers   a gateway with two worker processes

All processes listen on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import (
    ENV,
    GatewayProcess,
    complete_config,
    gateway_process,
    mock_fleet,
    run_process,
)
from tests.e2e.restart_traffic import (
    killing_successors,
    learned_state,
    restart,
    traffic,
    until_gone,
)
from tests.ports import free_port

CONFIG = """
models: [{{name: demo-8b, pool: main}}]
pools:
  main:
    policy: prefix_aware
    admission: none
    endpoints:
      - {{url: '{0}', name: a}}
      - {{url: '{1}', name: b}}
      - {{url: 'http://127.0.0.1:{dead}', name: dead}}
health: {{backoff: 600s, backoff_max: 600s, timeout: 10s, progress: 60s}}
timeouts: {{connect: 10s}}
limits: {{idle_timeout: 5s}}
workers: {workers}
"""
ACTIVATE = "systemd-socket-activate"
MODES = ("sigusr2", "socket", "workers")
GOOD = {"streams answered", "requests answered"}


@contextmanager
def activated(folder: Path, config: str, patience: str) -> Iterator[GatewayProcess]:
    file, ports = folder / "gateway.yaml", (free_port(), free_port())
    file.write_text(complete_config(config) + patience)
    listen = [word for port in ports for word in ("-l", f"127.0.0.1:{port}")]
    passed = [word for name in ENV for word in ("-E", name)]
    serve = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    command = [ACTIVATE, *listen, "--fdname=api:admin", *passed, *serve]
    with run_process(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV
    ) as process:
        assert process.stderr
        running_gateway = GatewayProcess(process)
        threading.Timer(1.0, _connect, ports[:1]).start()
        running_gateway.read_until_ready(process.stderr)
        yield running_gateway


def _connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
        pass


async def restart_by_successors(
    running_gateway: GatewayProcess, restarts: int, streams: int, shorts: int
) -> Counter[str]:
    """Restart a gateway repeatedly with SIGUSR2. Each process hands its sockets to the next one.

    Returns the number of requests by outcome.
    """
    pids = [running_gateway.pid]
    async with traffic(running_gateway.url, streams, shorts, tokens=200) as load:
        await asyncio.sleep(3.0)
        for number in range(restarts):
            before = learned_state(running_gateway)
            pids.append(await restart(running_gateway, pids[-1]))
            after = learned_state(running_gateway)
            _print_restart(number, f"pid {pids[-1]}", before, after, load.counts)
            await asyncio.sleep(1.0)
    for problem in load.problems[:10]:
        print("  ", problem)
    for pid in pids[:-1]:
        await until_gone(pid)
    os.kill(pids[-1], signal.SIGTERM)
    await until_gone(pids[-1])
    return load.counts


async def restart_workers(
    running_gateway: GatewayProcess, restarts: int, streams: int, shorts: int
) -> Counter[str]:
    """Restart the worker processes of a gateway repeatedly, by SIGUSR2 to their supervisor.

    Returns the number of requests by outcome.
    """
    async with traffic(running_gateway.url, streams, shorts, tokens=200) as load:
        await asyncio.sleep(3.0)
        for number in range(restarts):
            before, text = learned_state(running_gateway), "worker processes have been replaced"
            known = running_gateway.stderr_text.count(text)
            os.kill(running_gateway.pid, signal.SIGUSR2)
            async with asyncio.timeout(120):
                while running_gateway.stderr_text.count(text) == known:
                    await asyncio.sleep(0.05)
            _print_restart(
                number, "workers replaced", before, learned_state(running_gateway), load.counts
            )
    for problem in load.problems[:10]:
        print("  ", problem)
    return load.counts


def _print_restart(
    number: int,
    event: str,
    before: dict[str, object],
    after: dict[str, object],
    counts: Counter[str],
) -> None:
    ejected = [
        sorted(name for name, state in status["states"].items() if state in ("ejected", "dead"))  # type: ignore[attr-defined]
        for status in (before, after)
    ]
    print(
        f"  {number + 1:2}: {event}; index {before['index_bytes']} -> {after['index_bytes']} bytes,"
        f" cached tokens {before['held_tokens']} -> {after['held_tokens']},"
        f" ejected {ejected[0]} -> {ejected[1]}; so far {dict(counts)}",
        flush=True,
    )


def run_mode(mode: str, options: argparse.Namespace) -> bool:
    """Run the restarts of one mode (sigusr2, socket or workers).

    Returns True if no request was refused and no stream was cut off.
    """
    if mode == "socket" and shutil.which(ACTIVATE) is None:
        print(f"{mode}: {ACTIVATE} is missing; install the Debian package systemd", flush=True)
        return False
    print(
        f"{mode}: {options.restarts} restarts, {options.streams} streams on keep-alive connections",
        flush=True,
    )
    open_gateway: Callable[[Path, str, str], AbstractContextManager[GatewayProcess]] = (
        activated if mode == "socket" else gateway_process
    )
    work = restart_workers if mode == "workers" else restart_by_successors
    with (
        tempfile.TemporaryDirectory(prefix="penstock-restarts-") as folder,
        mock_fleet("--speed", "4") as urls,
    ):
        config = CONFIG.format(*urls, dead=free_port(), workers=2 if mode == "workers" else 1)
        with (
            open_gateway(Path(folder), config, "") as running_gateway,
            killing_successors(running_gateway),
        ):
            counts = asyncio.run(
                work(running_gateway, options.restarts, options.streams, options.shorts)
            )
    print(f"{mode}: refused {counts['refused']}, cut {counts['cut']}; {dict(counts)}", flush=True)
    return set(+counts) <= GOOD


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        help="number of restarts per mode (default: %(default)s)",
    )
    parser.add_argument(
        "--streams",
        type=int,
        default=40,
        help="number of clients that read long streamed answers (default: %(default)s)",
    )
    parser.add_argument(
        "--shorts",
        type=int,
        default=4,
        help="number of clients that send short requests one after another (default: %(default)s)",
    )
    parser.add_argument(
        "--only", choices=MODES, help="measure only this way to restart (default: all three)"
    )
    options = parser.parse_args()
    good = [run_mode(mode, options) for mode in MODES if options.only in (None, mode)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
