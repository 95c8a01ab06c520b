"""Measures how long the gateway's metrics take: to count, to observe a value, to print all of them.

python bench/bench_metrics.py
"""

from __future__ import annotations

import sys
import time
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.metrics.catalogue import Metrics
from gateway.metrics.exposition import render_family

ROUNDS = 200_000


def main() -> None:
    """Print how long a call of each metric type takes, and how long a scrape of 64 endpoints takes.

    Each time is the median of seven runs.
    """
    metrics = Metrics()
    ttft = metrics.ttft_seconds.labels("demo-8b", "127.0.0.1:9000")
    counter = metrics.bytes_out_total
    for name, call in {
        "histogram.observe": lambda: ttft.observe(0.213),
        "counter.inc": lambda: counter.inc(1024),
        "labels + observe": lambda: metrics.ttft_seconds.labels(
            "demo-8b", "127.0.0.1:9000"
        ).observe(0.213),
    }.items():
        runs = sorted(timeit.repeat(call, number=ROUNDS, repeat=7))
        print(f"{name:20} {runs[3] / ROUNDS * 1e6:.3f} us")
    for number in range(64):
        for family in (metrics.ttft_seconds, metrics.tpot_seconds):
            family.labels("demo-8b", f"10.0.0.{number}:8000").observe(0.1)
    longest, total = 0.0, 0.0
    started = time.perf_counter()
    for reading in metrics.collect():
        render_family(reading, exemplars=False)
        now = time.perf_counter()
        longest, total, started = max(longest, now - started), total + now - started, now
    print(f"{'scrape, 64 endpoints':20} {total * 1e3:.1f} ms, longest slice {longest * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
