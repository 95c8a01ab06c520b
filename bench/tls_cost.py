"""`make bench-tls`: measures the CPU cost of TLS, in the gateway and in nginx.

    python bench/tls_cost.py [--rounds N] [--window-ms D] [--compiled]

The gateway and nginx serve the same traffic, each with and without TLS. All four use the same
backend, core and certificate. Each round measures each of them for one period, in random order.

The load generator does not support TLS. A second nginx, on the load generator's core, forwards its
requests with or without TLS. The CPU time is that of the measured gateway or nginx alone.

The column "added" is the median difference between TLS and plain HTTP in the same round, with its
95% confidence interval.
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
from compared_systems import (
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
from confidence_intervals import median_interval
from traffic_cells import Measure, Pace, cpu_per_request, paced, streams

PLAIN, TLS = ("penstock", "nginx"), ("penstock TLS", "nginx TLS")
KEPT, NEW = 200, 300
"""Offsets of the two ports of the second nginx.

On the port KEPT it keeps its connections to the measured system open; on NEW it opens one per
request.
"""


@dataclass(frozen=True)
class TlsCell:
    """One kind of traffic for which the cost of TLS is measured.

    measure  function that measures it
    offset   offset of the port to which it is sent (KEPT or NEW)
    """

    name: str
    measure: Measure
    offset: int


CELLS = (
    TlsCell("request", cpu_per_request, KEPT),
    TlsCell("chunk, 200 streams", streams(200, paced(100, 10_000, 5_000), 104), KEPT),
    TlsCell("request on a new connection", cpu_per_request, NEW),
)


def main() -> None:
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
        stack.enter_context(_second_nginx([item.system for item in running.values()], work))
        print(
            f"{'':28} {'':9} {'plain':>8} {'TLS':>8} {'added':>8}   95 % interval   "
            f"us of CPU, {options.rounds} rounds"
        )
        for cell in CELLS:
            rounds = range(options.rounds)
            _print_row(cell, [_measure_round(cell, running, pace, work, order) for _ in rounds])


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
    files = Certificate(work / "server.pem", work / "server.key")
    files.certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(files.key)
    return files


def _nginx_config(systems: Sequence[System], folder: Path) -> str:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp = "\n".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    servers = "\n".join(_servers(system) for system in systems)
    return f"""
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
"""


@contextmanager
def _second_nginx(systems: Sequence[System], work: Path) -> Iterator[None]:
    # Run an nginx that forwards requests to the systems under test.
    #
    # For each system it listens on two ports: KEPT and NEW above the system's own.
    folder = work / "second"
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(_nginx_config(systems, folder))
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
    servers = []
    for offset, keep in ((KEPT, "keepalive 1024; keepalive_requests 1000000000;"), (NEW, "")):
        name = f"to_{system.port + offset}"
        servers.append(f"""
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
    return "".join(servers)


def _measure_round(
    cell: TlsCell, running: Mapping[str, Running], pace: Pace, work: Path, order: random.Random
) -> dict[str, float]:
    # Measure each system once in random order; return µs of CPU per unit by name.
    names = list(running)
    order.shuffle(names)
    cpu_us = {}
    for name in names:
        system = running[name].system
        behind_nginx = replace(system, port=system.port + cell.offset)
        target = replace(running[name], system=behind_nginx)
        cpu_us[name] = cell.measure(target, pace, work)["cpu"]
    return cpu_us


def _print_row(cell: TlsCell, rounds: Sequence[Mapping[str, float]]) -> None:
    for plain, tls in zip(PLAIN, TLS, strict=True):
        low, middle, high = median_interval([cpu_us[tls] - cpu_us[plain] for cpu_us in rounds])
        before, after = (median(cpu_us[name] for cpu_us in rounds) for name in (plain, tls))
        figures = f"{before:8.1f} {after:8.1f} {middle:8.1f}   {low:.1f} to {high:.1f}"
        print(f"{cell.name:28} {plain:9} {figures}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=12,
        help="number of rounds; each measures every system for one period (default: %(default)s)",
    )
    parser.add_argument(
        "--window-ms",
        type=int,
        default=1000,
        help="length of a measured period in milliseconds (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed of the measuring order")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile the gateway first, as the container image does",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
