"""`make slow`: four mock TP groups over HTTP, one of them slow, beside the same run over the other three.

    python -m tests.load.slow_engine [--policy NAME]... [--factor 10] [--only prefill|decode] [--seconds 40]

The load is the same for both runs: 0.5 of what three healthy groups serve. The slow one is slow from the start of the
process; `--at` makes it slow later. Printed for each policy: the slow group's share of the requests sent from 10 s
after it became slow, p99 TTFT of all requests of both runs, hedges, and what the gateway said of its endpoints.
Exit status: 1 when a share is above 1 %, a p99 above twice the other, or hedges above 5 %.
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
from pathlib import Path
from statistics import quantiles
from typing import Any

from planner.bench import Plan, run
from policies import registry
from tests.load.run import ROOT, _await_models, _free_ports, _free_run

GROUPS, RATE = 4, 12.0
MODEL = ("--model", "llama-3.1-70b-fp8", "--gpu", "h200", "--tp", "4")
KEPT_S = 10.0


def main() -> int:
    options = _options()
    failed = False
    for policy in options.policy or registry.names():
        slow = one_run(policy, options, GROUPS)
        three = one_run(policy, options, GROUPS - 1)
        print(f"{policy:<19} {_line(slow, three)}", flush=True)
        failed |= slow["share"] > 0.01 or slow["p99_s"] > 2 * three["p99_s"] or slow["hedges"] > 0.05
    return int(failed)


def _line(slow: dict[str, Any], three: dict[str, Any]) -> str:
    return (
        f"share {slow['share']:.2%}, p99 TTFT {slow['p99_s'] * 1e3:.0f} ms over {slow['requests']} requests, "
        f"over the three {three['p99_s'] * 1e3:.0f} ms, median {slow['p50_s'] * 1e3:.0f} and "
        f"{three['p50_s'] * 1e3:.0f} ms, hedges {slow['hedges']:.2%}, errors {slow['errors']}; {slow['said']}"
    )


def one_run(policy: str, options: argparse.Namespace, groups: int) -> dict[str, Any]:
    """One gateway and its mocks. With three groups nobody is slow."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first, (port, admin_port) = _free_run(groups), _free_ports(2)
        mock = ["-m", "mockgpu", "--port", str(first), "--groups", str(groups), "--speed", str(options.speed), *MODEL]
        stack.enter_context(_running(mock, first, folder))
        urls = [f"http://127.0.0.1:{first + slot}" for slot in range(groups)]
        file, log = folder / "gateway.yaml", folder / "access.jsonl"
        engines = ", ".join(f"{{url: '{url}'}}" for url in urls)
        file.write_text(
            f"version: 1\nlisteners: {{api: {{port: {port}}}, admin: {{port: {admin_port}}}}}\n"
            f"observability: {{access_log: '{log}'}}\npools: {{main: {{policy: {policy}, endpoints: [{engines}]}}}}\n"
        )
        if groups == GROUPS and options.at == 0:
            _fault(urls[0], options, 0.0)
        stack.enter_context(_running(["-m", "gateway", "serve", "--config", str(file)], port, folder))
        if groups == GROUPS and options.at > 0:
            _fault(urls[0], options, options.at)
        began = time.time()
        plan = Plan(url=f"http://127.0.0.1:{port}", rate=options.rate, duration_s=options.seconds, seed=options.seed)
        report = asyncio.run(run(plan))
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=5).read().decode()
        time.sleep(1.0)
        return _figures(log, began + options.at, urls[0] if groups == GROUPS else "", report.errors, metrics, folder)


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
        "said": " | ".join(_said(folder)),
    }


def _said(folder: Path) -> list[str]:
    return [line[-150:].strip() for line in (folder / "said").read_text().splitlines() if "endpoint " in line][:6]


def _fault(url: str, options: argparse.Namespace, after_s: float) -> None:
    only = "" if options.only is None else f":{options.only}"
    window = f"@{after_s:g}-" if after_s else ""
    body = json.dumps({"spec": f"slow:x={options.factor:g}{only}{window}"}).encode()
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
    parser = argparse.ArgumentParser(prog="tests.load.slow_engine", description="One slow group of four.")
    parser.add_argument("--policy", action="append", help="default: all")
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--only", choices=("prefill", "decode"))
    parser.add_argument("--at", type=float, default=0.0, help="seconds after the first request; 0: before it")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second")
    parser.add_argument("--speed", type=float, default=1.0, help="of the mocks")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
