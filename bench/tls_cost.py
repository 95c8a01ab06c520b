"""What TLS costs: CPU of the gateway and of nginx for the same traffic, each plain and with TLS, in one run.

    make bench-tls
    python bench/tls_cost.py [--rounds N] [--window-ms D] [--compiled]

All four serve the same backend (bench/backend.c) from the same core, with the same certificate. Each round has a window of
each, in random order. The load generator speaks plain HTTP: a second nginx on its core passes every request on to the
system under test, over TLS where that has it, and over plain HTTP where not. CPU is that of the system's processes.

"added" is the median of the differences between TLS and plain of the same round, with its 95 % interval by order
statistics.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import trustme
from cells import Measure, Pace, cpu_per_request, paced, streams
from intervals import median_interval
from systems import (
    COMPILED,
    LOAD_CORE,
    ROOT,
    Certificate,
    Running,
    System,
    backend,
    backend_urls,
    build_tools,
    compile_penstock,
    free_base,
    nginx_binary,
    nginx_command,
    penstock_command,
    pinned,
    start,
)

PLAIN, TLS = ("penstock", "nginx"), ("penstock TLS", "nginx TLS")
KEPT, NEW = 200, 300
"""Offsets of the ports of the second nginx: it keeps its connections to the system, or opens one for each request."""


@dataclass(frozen=True)
class TlsCell:
    """One kind of traffic: its name, how it is measured, and the offset of the ports that it goes to."""

    name: str
    measure: Measure
    offset: int


CELLS = (
    TlsCell("request", cpu_per_request, KEPT),
    TlsCell("chunk, 200 streams", streams(200, paced(100, 10_000, 5_000), 104), KEPT),
    TlsCell("request on a new connection", cpu_per_request, NEW),
)


def main() -> None:
    """Prints a line for each kind of traffic and each system."""
    options = _options()
    build_tools()
    if options.compiled:
        problems = compile_penstock()
        if problems:
            sys.exit(str(problems))
    base, order = free_base(), random.Random(options.seed)
    pace = Pace(options.window_ms, 300)
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as folder, ExitStack() as stack:
        work = Path(folder)
        stack.enter_context(backend(base))
        running = {}
        for system in _systems(base, _certificate(work), COMPILED if options.compiled else ROOT):
            running[system.name] = start(system, work)
            stack.callback(running[system.name].stop)
        stack.enter_context(_second_nginx([each.system for each in running.values()], work))
        print(
            f"{'':28} {'':9} {'plain':>8} {'TLS':>8} {'added':>8}   95 % interval   us of CPU, {options.rounds} rounds"
        )
        for cell in CELLS:
            _show(cell, [_round(cell, running, pace, work, order) for _ in range(options.rounds)])


def _systems(base: int, certificate: Certificate, home: Path) -> Iterator[System]:
    urls = backend_urls(base)
    for number, tls in enumerate((None, certificate)):
        suffix, scheme = ("", "http") if tls is None else (" TLS", "https")
        ours = penstock_command("round_robin", urls, tls)
        yield System(
            f"penstock{suffix}", "round_robin", base + 101 + 2 * number, ours, home, scheme
        )
        theirs = partial(nginx_command, urls, tls=tls)
        yield System(f"nginx{suffix}", "round_robin", base + 102 + 2 * number, theirs, ROOT, scheme)


def _certificate(work: Path) -> Certificate:
    issued = trustme.CA().issue_cert("127.0.0.1")
    found = Certificate(work / "server.pem", work / "server.key")
    found.certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(found.key)
    return found


@contextmanager
def _second_nginx(systems: Sequence[System], work: Path) -> Iterator[None]:
    """Passes requests on from ports that are KEPT and NEW above a system's own."""
    folder = work / "second"
    folder.mkdir()
    config = folder / "nginx.conf"
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp = "\n".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    servers = "\n".join(_servers(system) for system in systems)
    config.write_text(f"""
worker_processes 1;
daemon off;
pid {folder / "nginx.pid"};
error_log {folder / "nginx.err"} error;
worker_rlimit_nofile 20000;
events {{ worker_connections 9000; }}
http {{
{temp}
access_log off;
tcp_nodelay on;
keepalive_requests 1000000000;
{servers}
}}
""")
    command = [
        nginx_binary(),
        "-c",
        str(config),
        "-e",
        str(folder / "nginx.err"),
        "-p",
        str(folder),
    ]
    process = subprocess.Popen(pinned(LOAD_CORE, command))
    try:
        _await_port(systems[-1].port + NEW, time.monotonic() + 10)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _await_port(port: int, deadline: float) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _servers(system: System) -> str:
    """Two servers of the second nginx, before one system."""
    made = []
    for offset, keep in ((KEPT, "keepalive 1024; keepalive_requests 1000000000;"), (NEW, "")):
        name = f"to_{system.port + offset}"
        made.append(f"""
upstream {name} {{ server 127.0.0.1:{system.port}; {keep} }}
server {{
  listen 127.0.0.1:{system.port + offset} backlog=4096;
  location / {{
    proxy_pass {system.scheme}://{name};
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_buffering off;
    proxy_ssl_session_reuse off;
    proxy_ssl_protocols TLSv1.3;
  }}
}}""")
    return "".join(made)


def _round(
    cell: TlsCell, running: Mapping[str, Running], pace: Pace, work: Path, order: random.Random
) -> dict[str, float]:
    """us of CPU for each unit, by system."""
    names = list(running)
    order.shuffle(names)
    found = {}
    for name in names:
        each = running[name]
        shown = replace(each, system=replace(each.system, port=each.system.port + cell.offset))
        found[name] = cell.measure(shown, pace, work)["cpu"]
    return found


def _show(cell: TlsCell, rounds: Sequence[Mapping[str, float]]) -> None:
    for plain, tls in zip(PLAIN, TLS, strict=True):
        low, middle, high = median_interval([each[tls] - each[plain] for each in rounds])
        before, after = (median(each[name] for each in rounds) for name in (plain, tls))
        figures = f"{before:8.1f} {after:8.1f} {middle:8.1f}   {low:.1f} to {high:.1f}"
        print(f"{cell.name:28} {plain:9} {figures}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--window-ms", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of the order within rounds")
    parser.add_argument(
        "--compiled", action="store_true", help="compile the gateway first, as the image has it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
