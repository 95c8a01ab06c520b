"""What a second worker brings, and what its share of the view costs: `python tests/bench/workers.py [--rounds 3]`.

One gateway, and two workers with their supervisor, take the same closed-loop load in alternation, both on one core; the
load generator and the static engines have the other. There is no core left to show throughput on, so what counts is
processor time per request, supervisor included: two workers on cores of their own serve 2 x (one's / theirs) of what
one does. Windows in which others took much of the core say little; their share is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from cells import Pace, drive, write_bodies
from systems import ADMIN, MODEL, Running, System, backend, backend_urls, build_tools, free_base, start

GOAL = 1.7
WORDS = "How does a water wheel work? "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-ms", type=int, default=1500)
    asked = parser.parse_args()
    build_tools()
    base, pace = free_base(), Pace(asked.window_ms, 300)
    with tempfile.TemporaryDirectory() as place, backend(base):
        work = Path(place)
        urls = backend_urls(base)
        running = [start(System("penstock", f"{n}", base + 100 + n, _command(urls, n)), work) for n in (1, 2)]
        try:
            for name, bodies in _kinds(work):
                _print(name, [tuple(_cpu_us(each, pace, bodies) for each in running) for _ in range(asked.rounds)])
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
    made: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 64}
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


def _cpu_us(running: Running, pace: Pace, bodies: Path) -> tuple[float, float]:
    """µs of processor time per request, and the share of the core that others took."""
    report = drive(running, pace, bodies, mode="closed", connections=32)
    return float(report["cpu_s"]) / report["requests"] * 1e6, float(report["others"])


def _print(name: str, rounds: list[tuple[tuple[float, float], ...]]) -> None:
    one, two = (median(each[at][0] for each in rounds) for at in (0, 1))
    gain = median(2 * each[0][0] / each[1][0] for each in rounds)
    others = max(share for each in rounds for _, share in each)
    verdict = "met" if gain >= GOAL else "MISSED"
    print(
        f"{name:32} one {one:6.1f} us, of two {two:6.1f} us a request: two cores serve {gain:.2f} times as much "
        f"(goal >= {GOAL}: {verdict}); others had up to {others:.0%} of the core",
        flush=True,
    )


if __name__ == "__main__":
    main()
