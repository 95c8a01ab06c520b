"""Measures how much a second worker process increases the gateway's request rate, on two cores.

    python bench/second_worker.py [--rounds 5]

A gateway with one process alternates with a gateway with two workers and a supervisor. The single
process has the first core alone. The two workers use both cores, and share the second one with the
load generator and the test engines.

To compensate for this, the result is the number of requests per second and per core that other
processes left to the gateway. Such CPU time counts even if the gateway did not use it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from compared_systems import (
    ADMIN,
    GATEWAY_CORE,
    LOAD_CORE,
    MODEL,
    Running,
    System,
    backend,
    backend_urls,
    build_tools,
    core_busy_s,
    free_base,
    start,
)
from traffic_cells import Pace, drive, write_bodies

GOAL = 1.7
CORES = (GATEWAY_CORE, LOAD_CORE)
CONNECTIONS = 128
"""Number of client connections.

With this many connections, the kernel distributes them about evenly between two workers.
"""

WORDS = "How does a water wheel work? "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of rounds; each measures one and two workers for one period (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--window-ms",
        type=int,
        default=1500,
        help="length of a measured period in milliseconds (default: %(default)s)",
    )
    options = parser.parse_args()
    build_tools()
    base, pace = free_base(), Pace(options.window_ms, 300)
    with tempfile.TemporaryDirectory() as folder, backend(base):
        work = Path(folder)
        urls = backend_urls(base)
        running: list[Running] = []
        try:
            specs = [System("penstock", f"{n}", base + 100 + n, _command(urls, n)) for n in (1, 2)]
            for spec in specs:
                running.append(start(spec, work))  # noqa: PERF401 - stopped even if the next fails
            _allow_all_cores(running[1])
            for name, bodies in _kinds(work):
                one, two = running
                rounds = range(options.rounds)
                _print_row(
                    name,
                    [(_measure(one, pace, bodies), _measure(two, pace, bodies)) for _ in rounds],
                )
        finally:
            for system in running:
                system.stop()


def _kinds(work: Path) -> list[tuple[str, Path]]:
    rng = Random(1)
    long = ["".join(rng.choices("abcdefgh ijkl", k=10_000)) for _ in range(64)]
    return [
        ("short prompt", write_bodies(work / "short", [_body(f"################ {WORDS}")])),
        (
            "2,500 tokens, new at its end",
            write_bodies(work / "long", [_body(f"{text} ################") for text in long]),
        ),
    ]


def _body(content: str) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 64,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _command(urls: list[str], workers: int) -> Callable[[Path, int], list[str]]:
    def command(work: Path, port: int) -> list[str]:
        config = work / f"penstock-{workers}.yaml"
        endpoints = "".join(f"      - {{url: {url}, max_concurrency: 8192}}\n" for url in urls)
        config.write_text(
            f"version: 1\nworkers: {workers}\n"
            f"listeners:\n  api: {{port: {port}}}\n  admin: {{port: {port + ADMIN}}}\n"
            f"models:\n  - {{name: {MODEL}, pool: main}}\n"
            f"pools:\n  main:\n    policy: prefix_aware\n    endpoints:\n{endpoints}"
            f"observability:\n  access_log: {work / f'access-{workers}'}\n"
        )
        return [sys.executable, "-m", "gateway", "serve", "--config", str(config)]

    return command


class Window(NamedTuple):
    """One measured period: the gateway's request rate, and the processor cores that it had.

    rate  requests per second
    left  number of cores that other processes left to the gateway, whether it used them or not
    used  number of cores that the gateway used
    """

    rate: float
    left: float
    used: float


def _measure(running: Running, pace: Pace, bodies: Path) -> Window:
    began_s, busy_s = time.monotonic(), _both_busy_s()
    report = drive(running, pace, bodies, mode="closed", connections=CONNECTIONS)
    idle = len(CORES) - (_both_busy_s() - busy_s) / (time.monotonic() - began_s)
    used = report["cpu_s"] / report["window_s"]
    return Window(report["requests"] / report["window_s"], used + max(0.0, idle), used)


def _both_busy_s() -> float:
    return sum(map(core_busy_s, CORES))


def _allow_all_cores(running: Running) -> None:
    for pid in running.pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), CORES)


def _print_row(name: str, rounds: list[tuple[Window, Window]]) -> None:
    one, two = ([pair[index] for pair in rounds] for index in (0, 1))
    one_rate = median(window.rate / window.used for window in one)
    two_rate = median(window.rate / window.left for window in two)
    gain = median(
        2 * second.rate / second.left * first.used / first.rate for first, second in rounds
    )
    idle = median(1 - window.used / window.left for window in two)
    left = median(window.left for window in two)
    verdict = "met" if gain >= GOAL else "MISSED"
    print(
        f"{name:32} one worker {one_rate:6.0f} requests/s on its core, two workers {two_rate:6.0f} "
        f"per core of the {left:.2f} left to them ({idle:.0%} idle): {gain:.2f} times the rate on "
        f"two cores (goal >= {GOAL}: {verdict})",
        flush=True,
    )


if __name__ == "__main__":
    main()
