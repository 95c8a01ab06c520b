"""`make slow`: four mock TP groups over HTTP, one of them slow, beside the same run over the other three.

    python -m bench.load.slow_engine [--policy NAME]... [--case NAME]... [--seconds 30]

The load is the same for all runs: 0.5 of what three healthy groups serve. The slow one is slow from the start of the
process; `--at` makes it slow later. The cases:

    10x         ten times slower at everything
    3x          three times slower at everything
    3x-decode   three times slower per token alone
    unequal     two groups take twice as long and say so by their label `gpu`: none may be ejected

Printed for each: the slow group's share of the requests sent from 10 s after it became slow, p99 TTFT of all requests
beside that of the three alone, hedges, and when an endpoint was ejected. Exit status: 1 when a share is above 1 %, a
p99 above twice the other, hedges above 5 %, or an endpoint of `unequal` was ejected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from bench.load.run import ROOT, _await_models, _free_ports, _free_run
from planner.bench import BenchPlan, run
from policies import registry

GROUPS, RATE = 4, 12.0
MODEL = ("--model", "llama-3.1-70b-fp8", "--gpu", "h200", "--tp", "4")
KEPT_S = 10.0


class Case(NamedTuple):
    """What is wrong with the first groups: `slow` of them take `factor` times as long, and say so if `declared`."""

    factor: float
    only: str = ""
    slow: int = 1
    declared: bool = False


HEALTHY = Case(1.0, slow=0)
CASES = {
    "10x": Case(10.0),
    "3x": Case(3.0),
    "3x-decode": Case(3.0, "decode"),
    "unequal": Case(2.0, slow=2, declared=True),
}


def main() -> int:
    options = _options()
    failed = 0
    for policy in options.policy or registry.names():
        three = one_run(policy, options, GROUPS - 1, HEALTHY)
        for name in options.case or CASES:
            found = one_run(policy, options, GROUPS, CASES[name])
            holds = _holds(CASES[name], found, three)
            failed += not holds
            print(f"{'' if holds else 'FAILS '}{policy:<19} {name:<10} {_line(found, three)}", flush=True)
    print(f"{failed} of the cells fail" if failed else "all cells hold")
    return int(failed > 0)


def _holds(case: Case, found: dict[str, Any], three: dict[str, Any]) -> bool:
    if found["errors"] or found["hedges"] > 0.05:
        return False
    if case.declared:
        return not found["ejected"]
    return found["share"] <= 0.01 and found["p99_s"] <= 2 * three["p99_s"]


def _line(slow: dict[str, Any], three: dict[str, Any]) -> str:
    ejected = " ".join(f"{after_s:.0f}" for after_s in slow["ejected"]) or "-"
    return (
        f"share {slow['share']:.2%}, p99 TTFT {slow['p99_s'] * 1e3:.0f} ms over {slow['requests']} requests, "
        f"of the three {three['p99_s'] * 1e3:.0f} ms, median {slow['p50_s'] * 1e3:.0f} and "
        f"{three['p50_s'] * 1e3:.0f} ms, hedges {slow['hedges']:.2%}, ejected at {ejected} s, errors {slow['errors']}"
    )


def one_run(policy: str, options: argparse.Namespace, groups: int, case: Case) -> dict[str, Any]:
    """One gateway and its mocks."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first, (port, admin_port) = _free_run(groups), _free_ports(2)
        mock = ["-m", "mockgpu", "--port", str(first), "--groups", str(groups), "--speed", str(options.speed), *MODEL]
        stack.enter_context(_running(mock, first, folder))
        urls = [f"http://127.0.0.1:{first + slot}" for slot in range(groups)]
        file, log = folder / "gateway.yaml", folder / "access.jsonl"
        labels = [", labels: {gpu: small}" if case.declared and slot < case.slow else "" for slot in range(groups)]
        engines = ", ".join(f"{{url: '{url}'{label}}}" for url, label in zip(urls, labels, strict=True))
        file.write_text(
            f"version: 1\nlisteners: {{api: {{port: {port}}}, admin: {{port: {admin_port}}}}}\n"
            f"observability: {{access_log: '{log}'}}\npools: {{main: {{policy: {policy}, endpoints: [{engines}]}}}}\n"
        )
        for url in urls[: case.slow] if options.at == 0 else []:
            _fault(url, case, 0.0)
        stack.enter_context(_running(["-m", "gateway", "serve", "--config", str(file)], port, folder))
        for url in urls[: case.slow] if options.at > 0 else []:
            _fault(url, case, options.at)
        began = time.time()
        plan = BenchPlan(url=f"http://127.0.0.1:{port}", rate=options.rate, duration_s=options.seconds, seed=options.seed)
        report = asyncio.run(run(plan))
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=5).read().decode()
        time.sleep(1.0)
        slow = urls[0] if case.slow == 1 else ""
        return _figures(log, began + options.at, slow, report.errors, metrics, folder)


def _figures(log: Path, slow_at: float, slow: str, errors: object, metrics: str, folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    late = [line for line in lines if line["time"] >= slow_at + KEPT_S]
    ttfts = sorted((line["first_token_us"] - line["received_us"]) / 1e6 for line in lines if "first_token_us" in line)
    cuts = quantiles(ttfts, n=100)
    hedges = sum(
        float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith("penstock_hedges_total{")
    )
    name = slow.removeprefix("http://")
    return {
        "share": sum(line.get("endpoint") == name for line in late) / max(1, len(late)),
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "requests": len(lines),
        "hedges": hedges / max(1, len(lines)),
        "errors": errors,
        "ejected": _ejected(folder, slow_at),
    }


def _ejected(folder: Path, slow_at: float) -> list[float]:
    """When endpoints were ejected, in seconds after one became slow."""
    lines = [line for line in (folder / "said").read_text().splitlines() if "-> ejected" in line]
    return [datetime.fromisoformat(line.split()[0]).timestamp() - slow_at for line in lines]


def _fault(url: str, case: Case, after_s: float) -> None:
    only = f":{case.only}" if case.only else ""
    window = f"@{after_s:g}-" if after_s else ""
    body = json.dumps({"spec": f"slow:x={case.factor:g}{only}{window}"}).encode()
    request = urllib.request.Request(f"{url}/mock/fault", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=5).read()


@contextmanager
def _running(arguments: list[str], port: int, folder: Path) -> Iterator[None]:
    with (folder / "said").open("a") as said:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said)
        try:
            _await_models(process, f"http://127.0.0.1:{port}")
            yield
        finally:
            process.terminate()
            process.wait(20)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.load.slow_engine", description="One slow group of four.")
    parser.add_argument("--policy", action="append", help="default: all")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--at", type=float, default=0.0, help="seconds after the first request; 0: before it")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second")
    parser.add_argument("--speed", type=float, default=1.0, help="of the mocks")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
