"""`make policies`: compares routing policies by a recorded trace of conversations, over HTTP.

    python -m bench.load.policies_live [--runs 3] [--speed 8] [--requests 1500] [--policy NAME]...

Each run starts four mock engines (Llama 3.1 70B FP8 on 4 x H200), a gateway and a client, which
sends Mooncake's trace.

Requirements for the policy prefix_aware: 90% of the cache hit ratio of one cache that is as large
as the caches of all four engines, and the lowest mean time to first token. Exit status: 1 if it
misses one of them. A run takes 512 s / speed, so it is not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median

from bench.load.locust_run import ROOT, await_models
from planner.bench import BenchPlan, BenchReport, run
from tests.ports import free_run
from tests.sim.conversation import TRACE, conversation, shared_cache_hit_ratio
from tests.sim.test_policies_on_a_virtual_clock import ALL_KV_TOKENS, GROUP

GROUPS = GROUP.count
MODEL = ("--model", "llama-3.1-70b-fp8", "--gpu", "h200", "--tp", "4", "--groups", str(GROUPS))


def main() -> int:
    options = _options()
    ideal = shared_cache_hit_ratio(conversation(options.requests), ALL_KV_TOKENS)
    print(f"one shared LRU of {ALL_KV_TOKENS:,} tokens: hit ratio {ideal:.3f}")
    hits: dict[str, list[float]] = {name: [] for name in options.policy}
    ttfts: dict[str, list[float]] = {name: [] for name in options.policy}
    for number in range(options.runs):
        for policy in options.policy:
            with fleet(policy, options.speed) as url:
                plan = BenchPlan(
                    url=url,
                    trace=TRACE,
                    speed=options.speed,
                    limit=options.requests,
                    ignore_eos=True,
                )
                report = asyncio.run(run(plan))
            hits[policy].append(report.cached_ratio or 0.0)
            ttfts[policy].append(_mean_ttft_s(report) * options.speed)
            print(
                f"run {number + 1} {policy:<13} {_format_run(report, ideal, options.speed)}",
                flush=True,
            )
    best = hits.get("prefix_aware", [])
    return 0 if not best or _meets_requirements(best, ttfts, ideal) else 1


def _meets_requirements(hits: list[float], ttfts: dict[str, list[float]], ideal: float) -> bool:
    means = {name: fmean(values) for name, values in ttfts.items()}
    reached, lowest = median(hits) / ideal, min(means, key=lambda name: means[name])
    print(
        f"prefix_aware reaches {reached:.2f} of the shared LRU; "
        f"lowest mean TTFT: {lowest} ({means[lowest]:.2f} s)"
    )
    return reached >= 0.9 and lowest == "prefix_aware"


def _mean_ttft_s(report: BenchReport) -> float:
    return fmean(record.ttft_s for record in report.completed if record.ttft_s is not None)


def _format_run(report: BenchReport, ideal: float, speed: float) -> str:
    ratio, tokens = report.cached_ratio or 0.0, report.prompt_tokens / max(1, len(report.completed))
    worst = max((record.lag_s for record in report.records), default=0.0)
    return (
        f"hits {ratio:.3f} ({ratio / ideal:.2f}), "
        f"mean TTFT {_mean_ttft_s(report) * speed:.2f} s of model time, "
        f"{len(report.completed)} served, errors {report.errors}, "
        f"{tokens:.0f} prompt tokens per request, {report.duration_s:.0f} s, "
        f"longest send lag {worst * 1e3:.0f} ms"
    )


@contextmanager
def fleet(policy: str, speed: float, access_log: str = "off") -> Iterator[str]:
    """Run four mock engines with empty caches and a gateway, and yield the gateway's URL."""
    first = free_run(GROUPS + 2)
    port, admin_port = first + GROUPS, first + GROUPS + 1
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        mock = ["-m", "mockgpu", "--port", str(first), "--speed", str(speed), *MODEL]
        stack.enter_context(_running(mock, first))
        file = Path(folder, "gateway.yaml")
        urls = [f"http://127.0.0.1:{first + slot}" for slot in range(GROUPS)]
        engines = ", ".join(f"{{url: '{url}', max_concurrency: 256}}" for url in urls)
        file.write_text(
            f"version: 1\nlisteners: {{api: {{port: {port}}}, admin: {{port: {admin_port}}}}}\n"
            f"observability: {{access_log: '{access_log}'}}\n"
            f"pools: {{main: {{policy: {policy}, endpoints: [{engines}]}}}}\n"
        )
        stack.enter_context(_running(["-m", "gateway", "serve", "--config", str(file)], port))
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(arguments: list[str], port: int) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=quiet, stderr=quiet)
    try:
        await_models(process, f"http://127.0.0.1:{port}")
        yield
    finally:
        process.terminate()
        process.wait(20)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), "the port is still open"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.policies_live",
        description="Send a recorded trace over HTTP to a gateway with each policy.",
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="number of runs per policy (default: %(default)s)"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=8.0,
        help=(
            "factor by which the trace and the engines are faster than real time (default: "
            "%(default)s)"
        ),
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=1500,
        help="number of requests of the trace to send (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        help="policy to run; repeat the option for more (default: all three)",
    )
    options = parser.parse_args()
    options.policy = options.policy or ["round_robin", "least_loaded", "prefix_aware"]
    return options


if __name__ == "__main__":
    sys.exit(main())
