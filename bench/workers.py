"""What a second worker brings: `python bench/workers.py [--rounds 5]`, on a machine of two cores.

One gateway on a core of its own, and two workers with their supervisor on both, take the same closed-loop load in
alternation, as much as they can serve. The load generator and the static engines have the second core, and in the
second case share it with a worker. What they and others of the machine take of the cores is subtracted: requests a
second are compared for each core that was left. What was left and not used counts against two workers, and so does
whatever they cost each other: caches, memory, the view that they share.
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

from cells import Pace, drive, write_bodies
from systems import (
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

GOAL = 1.7
CORES = (GATEWAY_CORE, LOAD_CORE)
CONNECTIONS = 128  # so many that the kernel deals them to two workers about evenly
WORDS = "How does a water wheel work? "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-ms", type=int, default=1500)
    asked = parser.parse_args()
    build_tools()
    base, pace = free_base(), Pace(asked.window_ms, 300)
    with tempfile.TemporaryDirectory() as place, backend(base):
        work = Path(place)
        urls = backend_urls(base)
        running: list[Running] = []
        try:
            specs = [System("penstock", f"{n}", base + 100 + n, _command(urls, n)) for n in (1, 2)]
            running.extend(
                start(spec, work) for spec in specs
            )  # who has started is ended, even if the next does not
            _on_all_cores(running[1])
            for name, bodies in _kinds(work):
                one, two = running
                rounds = range(asked.rounds)
                _print(
                    name,
                    [
                        (_saturated(one, pace, bodies), _saturated(two, pace, bodies))
                        for _ in rounds
                    ],
                )
        finally:
            for each in running:
                each.stop()


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
    made: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 64,
    }
    return json.dumps(made, separators=(",", ":")).encode()


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
    """Requests a second while it lasted, the cores that nobody else took, and the cores that the gateway used."""

    rate: float
    left: float
    used: float


def _saturated(running: Running, pace: Pace, bodies: Path) -> Window:
    began_s, busy_s = time.monotonic(), _busy_s()
    report = drive(running, pace, bodies, mode="closed", connections=CONNECTIONS)
    idle = len(CORES) - (_busy_s() - busy_s) / (time.monotonic() - began_s)
    used = report["cpu_s"] / report["window_s"]
    return Window(report["requests"] / report["window_s"], used + max(0.0, idle), used)


def _busy_s() -> float:
    return sum(map(core_busy_s, CORES))


def _on_all_cores(running: Running) -> None:
    for pid in running.pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), CORES)


def _print(name: str, rounds: list[tuple[Window, Window]]) -> None:
    one, two = ([each[at] for each in rounds] for at in (0, 1))
    alone, both = (
        median(each.rate / each.used for each in one),
        median(each.rate / each.left for each in two),
    )
    gain = median(
        2 * with_two.rate / with_two.left * alone.used / alone.rate for alone, with_two in rounds
    )
    idle = median(1 - each.used / each.left for each in two)
    verdict = "met" if gain >= GOAL else "MISSED"
    print(
        f"{name:32} one {alone:6.0f} requests a second on its core, two {both:6.0f} on each that was left to them "
        f"({median(each.left for each in two):.2f}, {idle:.0%} of it idle): {gain:.2f} times as much on two cores "
        f"(goal >= {GOAL}: {verdict})",
        flush=True,
    )


if __name__ == "__main__":
    main()
