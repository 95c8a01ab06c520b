"""`make slow`: measures how the gateway treats one slow engine of four, over HTTP.

    python -m bench.load.slow_engine [--policy NAME]... [--case NAME]... [--seconds 30]

The load is half of what three healthy engines serve. Runs with the slow engine are compared with
runs of the three healthy engines alone. The slow engine is slow from the start, or from --at on:

    10x         ten times slower
    3x          three times slower
    3x-decode   three times slower per token, with normal prefills
    unequal     two engines are twice as slow, and their label `gpu` says that they differ

For each case, it prints the slow engine's share of the requests (without the first 10 s), the p99
time to first token of both runs, the number of requests that were sent to a second engine (hedged),
and when endpoints were ejected.

Exit status: 1 if a share is above 1%, a p99 is more than twice that of the three engines, more than
5% of the requests are hedged, or an endpoint of `unequal` is ejected.
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

from bench.load.locust_run import ROOT, await_models
from planner.bench import BenchPlan, run
from policies import policy_registry
from tests.ports import free_run

GROUPS, RATE = 4, 12.0
MODEL = ("--model", "llama-3.1-70b-fp8", "--gpu", "h200", "--tp", "4")
SETTLE_S = 10.0


class Case(NamedTuple):
    """Which of the four engines are slow in one measurement, and by how much.

    factor    how many times slower they are
    only      the steps that are slower: "prefill", "decode" or "" (all)
    slow      number of slow engines
    declared  whether the labels of the engines say that they differ
    """

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
    for policy in options.policy or policy_registry.names():
        three = run_case(policy, options, GROUPS - 1, HEALTHY)
        for name in options.case or CASES:
            result = run_case(policy, options, GROUPS, CASES[name])
            is_met = _meets_requirements(CASES[name], result, three)
            failed += not is_met
            text = _format_result(result, three)
            print(f"{'' if is_met else 'FAILS '}{policy:<19} {name:<10} {text}", flush=True)
    print(f"{failed} cases failed" if failed else "all cases passed")
    return int(failed > 0)


def _meets_requirements(case: Case, result: dict[str, Any], three: dict[str, Any]) -> bool:
    if result["errors"] or result["hedges"] > 0.05:
        return False
    if case.declared:
        return not result["ejected"]
    return result["share"] <= 0.01 and result["p99_s"] <= 2 * three["p99_s"]


def _format_result(slow: dict[str, Any], three: dict[str, Any]) -> str:
    ejected = " ".join(f"{after_s:.0f}" for after_s in slow["ejected"]) or "-"
    return (
        f"share {slow['share']:.2%}, p99 TTFT {slow['p99_s'] * 1e3:.0f} ms over "
        f"{slow['requests']} requests, of the three {three['p99_s'] * 1e3:.0f} ms, "
        f"median {slow['p50_s'] * 1e3:.0f} and {three['p50_s'] * 1e3:.0f} ms, "
        f"hedges {slow['hedges']:.2%}, ejected at {ejected} s, errors {slow['errors']}"
    )


def run_case(policy: str, options: argparse.Namespace, groups: int, case: Case) -> dict[str, Any]:
    """Measure one case of slow engines with a new gateway and new engines; return its results."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = free_run(groups + 2)
        port, admin_port = first + groups, first + groups + 1
        mock = ["-m", "mockgpu", "--port", str(first), "--groups", str(groups), *MODEL]
        stack.enter_context(_running([*mock, "--speed", str(options.speed)], first, folder))
        urls = [f"http://127.0.0.1:{first + slot}" for slot in range(groups)]
        file, log = folder / "gateway.yaml", folder / "access.jsonl"
        file.write_text(
            f"version: 1\nlisteners: {{api: {{port: {port}}}, admin: {{port: {admin_port}}}}}\n"
            f"observability: {{access_log: '{log}'}}\n"
            f"pools: {{main: {{policy: {policy}, endpoints: [{_list_endpoints(urls, case)}]}}}}\n"
        )
        if options.at == 0:
            _inject_faults(urls, case, 0.0)
        serve = ["-m", "gateway", "serve", "--config", str(file)]
        stack.enter_context(_running(serve, port, folder))
        if options.at > 0:
            _inject_faults(urls, case, options.at)
        started, url = time.time(), f"http://127.0.0.1:{port}"
        plan = BenchPlan(url=url, rate=options.rate, duration_s=options.seconds, seed=options.seed)
        errors = asyncio.run(run(plan)).errors
        with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=5) as answer:
            metrics = answer.read().decode()
        time.sleep(1.0)  # the access log is written meanwhile
        slow = urls[0] if case.slow == 1 else ""
        return _figures(log, started + options.at, slow, errors, metrics, folder)


def _list_endpoints(urls: list[str], case: Case) -> str:
    # Return the endpoints of the configuration, in YAML's flow style.
    labels = [", labels: {gpu: small}" if case.declared else ""] * case.slow
    labels += [""] * (len(urls) - case.slow)
    return ", ".join(f"{{url: '{url}'{label}}}" for url, label in zip(urls, labels, strict=True))


def _figures(
    log: Path, slow_at: float, slow: str, errors: object, metrics: str, folder: Path
) -> dict[str, Any]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    late = [line for line in lines if line["time"] >= slow_at + SETTLE_S]
    ttfts = sorted(
        (line["first_token_us"] - line["received_us"]) / 1e6
        for line in lines
        if "first_token_us" in line
    )
    cuts = quantiles(ttfts, n=100)
    hedges = sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("penstock_hedges_total{")
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
    lines = [
        line for line in (folder / "stderr.log").read_text().splitlines() if " to ejected (" in line
    ]
    return [datetime.fromisoformat(line.split()[0]).timestamp() - slow_at for line in lines]


def _inject_faults(urls: list[str], case: Case, after_s: float) -> None:
    # Make the slow engines of a case slow, `after_s` seconds from now.
    only = f":{case.only}" if case.only else ""
    window = f"@{after_s:g}-" if after_s else ""
    body = json.dumps({"spec": f"slow:x={case.factor:g}{only}{window}"}).encode()
    for url in urls[: case.slow]:
        request = urllib.request.Request(
            f"{url}/mock/fault", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=5).read()


@contextmanager
def _running(arguments: list[str], port: int, folder: Path) -> Iterator[None]:
    with (folder / "stderr.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            await_models(process, f"http://127.0.0.1:{port}")
            yield
        finally:
            process.terminate()
            process.wait(20)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.slow_engine",
        description="Measure routing policies while one of four mock engines is slow.",
    )
    parser.add_argument(
        "--policy",
        action="append",
        help="policy to measure; repeat the option for more (default: all)",
    )
    parser.add_argument(
        "--case",
        action="append",
        choices=CASES,
        help="case to measure; repeat the option for more (default: all)",
    )
    parser.add_argument(
        "--at",
        type=float,
        default=0.0,
        help="seconds after the first request at which one engine becomes slow; 0: slow from the "
        "start",
    )
    _add_run_options(parser)
    return parser.parse_args()


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    # Add the options that all cases share: length, load, speed and random seed of a run.
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="length of each run in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", type=float, default=RATE, help="number of requests sent per second"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        help="factor by which the mock engines are faster than real time (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the requests (default: %(default)s)"
    )


if __name__ == "__main__":
    sys.exit(main())
