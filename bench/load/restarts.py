"""Restart a gateway ten times under load with open streams, and count what was refused or cut: both have to be 0.

    python -m bench.load.restarts [--restarts 10] [--streams 40] [--shorts 4] [--only sigusr2|socket|workers]

sigusr2: a gateway with its own sockets. socket: one that systemd-socket-activate started. workers: two of them.
Ports are of 127.0.0.1; nothing outlives the run.
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
from contextlib import contextmanager
from pathlib import Path

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
from tests.fair_time import PATIENCE_S
from tests.ports import free_port

CONFIG = """
models: [{{name: demo-8b, pool: main}}]
pools:
  main:
    policy: prefix_aware
    admission: none
    endpoints: [{{url: '{0}', name: a}}, {{url: '{1}', name: b}}, {{url: 'http://127.0.0.1:{dead}', name: dead}}]
health: {{backoff: 600s, backoff_max: 600s, timeout: 10s, progress: 60s}}
timeouts: {{connect: 10s}}
limits: {{idle_timeout: 5s}}
workers: {workers}
"""
ACTIVATE = "systemd-socket-activate"
WAYS = ("sigusr2", "socket", "workers")
GOOD = {"streams answered", "requests answered"}


@contextmanager
def activated(folder: Path, config: str, patience: str) -> Iterator[GatewayProcess]:
    """A gateway on sockets that systemd-socket-activate opened; it starts with the first connection."""
    file, ports = folder / "gateway.yaml", (free_port(), free_port())
    file.write_text(complete_config(config) + patience)
    listen = [word for port in ports for word in ("-l", f"127.0.0.1:{port}")]
    passed = [word for name in ENV for word in ("-E", name)]
    serve = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    command = [ACTIVATE, *listen, "--fdname=api:admin", *passed, *serve]
    with run_process(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV) as process:
        assert process.stderr
        found = GatewayProcess(process)
        knock = threading.Timer(1.0, _knock, ports[:1])
        knock.start()
        found.read_until_ready(process.stderr)
        yield found


def _knock(port: int) -> None:

    with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
        pass


async def by_successors(gateway: GatewayProcess, restarts: int, streams: int, shorts: int) -> Counter[str]:
    """A process hands over to the next one, again and again."""
    pids = [gateway.pid]
    async with traffic(gateway.url, streams, shorts, tokens=200) as load:
        await asyncio.sleep(3.0)
        for number in range(restarts):
            before = learned_state(gateway)
            pids.append(await restart(gateway, pids[-1]))
            after = learned_state(gateway)
            _show(number, f"pid {pids[-1]}", before, after, load.counts)
            await asyncio.sleep(1.0)
    for problem in load.problems[:10]:
        print("  ", problem)
    for pid in pids[:-1]:
        await until_gone(pid)
    os.kill(pids[-1], signal.SIGTERM)
    await until_gone(pids[-1])
    return load.counts


async def by_workers(gateway: GatewayProcess, restarts: int, streams: int, shorts: int) -> Counter[str]:
    """A supervisor replaces its workers, again and again."""
    async with traffic(gateway.url, streams, shorts, tokens=200) as load:
        await asyncio.sleep(3.0)
        for number in range(restarts):
            before, text = learned_state(gateway), "replaced all"
            known = gateway.stderr_text.count(text)
            os.kill(gateway.pid, signal.SIGUSR2)
            async with asyncio.timeout(120):
                while gateway.stderr_text.count(text) == known:
                    await asyncio.sleep(0.05)
            _show(number, "workers replaced", before, learned_state(gateway), load.counts)
    for problem in load.problems[:10]:
        print("  ", problem)
    return load.counts


def _show(number: int, what: str, before: dict[str, object], after: dict[str, object], counts: Counter[str]) -> None:
    out = [
        sorted(name for name, state in told["states"].items() if state in ("ejected", "dead"))  # type: ignore[attr-defined]
        for told in (before, after)
    ]
    print(
        f"  {number + 1:2}: {what}; index {before['index_bytes']} -> {after['index_bytes']} bytes, held tokens"
        f" {before['held_tokens']} -> {after['held_tokens']}, out {out[0]} -> {out[1]}; so far {dict(counts)}",
        flush=True,
    )


def one_way(way: str, asked: argparse.Namespace) -> bool:
    """Whether nothing was refused or cut."""
    if way == "socket" and shutil.which(ACTIVATE) is None:
        print(f"{way}: {ACTIVATE} is not there; install the Debian package systemd", flush=True)
        return False
    print(f"{way}: {asked.restarts} restarts, {asked.streams} streams on kept connections", flush=True)
    open_gateway: Callable[[Path, str, str], object] = activated if way == "socket" else gateway_process
    work = by_workers if way == "workers" else by_successors
    with tempfile.TemporaryDirectory(prefix="penstock-restarts-") as folder, mock_fleet("--speed", "4") as urls:
        config = CONFIG.format(*urls, dead=free_port(), workers=2 if way == "workers" else 1)
        with open_gateway(Path(folder), config, "") as gateway, killing_successors(gateway):  # type: ignore[attr-defined]
            counts = asyncio.run(work(gateway, asked.restarts, asked.streams, asked.shorts))
    print(f"{way}: refused {counts['refused']}, cut {counts['cut']}; {dict(counts)}", flush=True)
    return set(+counts) <= GOOD


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--shorts", type=int, default=4)
    parser.add_argument("--only", choices=WAYS)
    asked = parser.parse_args()
    good = [one_way(way, asked) for way in WAYS if asked.only in (None, way)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
