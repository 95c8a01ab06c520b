"""`make bench-split`: compares the gateway's CPU time for split requests and for whole requests.

    python bench/split_cpu.py --rounds 3 --window-ms 800
    make compiled && python bench/split_cpu.py --compiled

A split request computes its prompt (prefill) on one engine and its answer (decode) on another one.
One gateway serves two models on the same engines (bench/backend.c). Requests for one model are
split, those for the other are not. Both are measured in turn, in short periods. The result is the
median of the ratios within a round.

Before that, Python instructions of the sources are counted (bench/opcodes.py). The counts are
exact, but include neither C code nor the kernel. Streams are not counted, because the number of
chunks per read varies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from compared_systems import (
    ADMIN,
    COMPILED,
    MODEL,
    ROOT,
    NotMeasurable,
    Running,
    System,
    backend,
    backend_urls,
    build_tools,
    free_base,
    start,
)
from opcodes import median_call
from traffic_cells import Pace, drive, write_bodies

GOAL = 2.2
SPLIT = "bench-split"
Command = Callable[[Path, int], list[str]]
WORDS = "How does a water wheel work? "


@dataclass(frozen=True)
class Kind:
    """One kind of request, whose CPU cost is measured when it is served whole and when it is split.

    prompt  its prompt
    stream  whether its answer is streamed
    """

    name: str
    prompt: str
    stream: bool = False

    def body(self, model: str) -> bytes:
        content = f"################ {self.prompt}"
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 64,
        }
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body, separators=(",", ":")).encode()


KINDS = (
    Kind("short prompt, plain answer", WORDS),
    Kind("2,500 words, plain answer", WORDS * 417),
    Kind(
        "short prompt, stream of 64 chunks",
        WORDS + "@bench chunks=64 every_us=2000 first_us=1000@",
        stream=True,
    ),
)


def main() -> None:
    """Measure each kind of request, and print its Python instructions and its CPU time.

    Three values are printed: for the whole request, for the split request, and their ratio. The
    goal applies only to answers that are not streamed.
    """
    options = _options()
    build_tools()
    base = free_base()
    with tempfile.TemporaryDirectory() as folder, backend(base):
        work, command = Path(folder), _command(backend_urls(base))
        if not options.compiled:
            _print_instructions(command, work, base + 100)
        home = COMPILED if options.compiled else ROOT
        running = start(System("penstock", "split", base + 100, command, home), work)
        try:
            _print_cpu_times(running, work, Pace(options.window_ms, 150), options.rounds)
        finally:
            running.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="number of rounds; each measures both models for one period (default: %(default)s)",
    )
    parser.add_argument(
        "--window-ms",
        type=int,
        default=1000,
        help="length of a measured period in milliseconds (default: %(default)s)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="measure the build of `make compiled` instead of the sources",
    )
    return parser.parse_args()


def _print_instructions(command: Command, work: Path, port: int) -> None:
    for kind in KINDS:
        if not kind.stream:
            bodies = [kind.body(model) for model in (MODEL, SPLIT)]
            counts = [uvloop.run(_instructions(command, work, port, body)) for body in bodies]
            _print(kind, "instructions", [tuple(counts)])


def _print_cpu_times(running: Running, work: Path, pace: Pace, rounds: int) -> None:
    for kind in KINDS:
        bodies = [write_bodies(work / model, [kind.body(model)]) for model in (MODEL, SPLIT)]
        times = [tuple(_cpu_us(running, pace, file) for file in bodies) for _ in range(rounds)]
        _print(kind, "us", times)


def _command(urls: list[str]) -> Command:
    def command(work: Path, port: int) -> list[str]:
        config = work / "penstock.yaml"
        roles = ("prefill", "prefill", "decode", "decode")
        endpoints = "".join(
            f"      - {{url: {url}, role: {role}, max_concurrency: 8192}}\n"
            for url, role in zip(urls, roles, strict=True)
        )
        config.write_text(
            f"version: 1\n"
            f"listeners:\n  api: {{port: {port}}}\n  admin: {{port: {port + ADMIN}}}\n"
            f"models:\n  - {{name: {MODEL}, pool: main}}\n"
            f"  - {{name: {SPLIT}, pool: main,"
            f" split: {{dialect: vllm_nixl, threshold_tokens: 1}}}}\n"
            f"pools:\n  main:\n    endpoints:\n{endpoints}"
            f"observability:\n  access_log: {work / 'access'}\n"
        )
        return [sys.executable, "-m", "gateway", "serve", "--config", str(config)]

    return command


async def _instructions(command: Command, work: Path, port: int, body: bytes) -> float:
    return float((await median_call(Path(command(work, port)[-1]), port, [body])).total)


def _cpu_us(running: Running, pace: Pace, bodies: Path) -> float:
    report = drive(running, pace, bodies, mode="closed", connections=16)
    if not report["requests"]:
        raise NotMeasurable(
            "no request was answered within a whole measured period; use a longer --window-ms"
        )
    return float(report["cpu_s"]) / report["requests"] * 1e6


def _print(kind: Kind, unit: str, rounds: list[tuple[float, ...]]) -> None:
    whole, split = (median(values) for values in zip(*rounds, strict=True))
    ratio = median(split / whole for whole, split in rounds)
    goal = "" if kind.stream else f"  goal <= {GOAL}: {'met' if ratio <= GOAL else 'MISSED'}"
    print(
        f"{kind.name:34} whole {whole:7.0f}  split {split:7.0f} {unit:12}  ratio {ratio:.2f}{goal}",
        flush=True,
    )


if __name__ == "__main__":
    main()
