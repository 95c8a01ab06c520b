"""`make bench-scale`: measures how the gateway's cost grows with endpoints, connections and
streams.

    python bench/scale.py --endpoints 4,1024 --rounds 3 --parts requests,background
    python bench/scale.py --parts streams --streams 2000,5000,9000 --chunk-ms 240

The compiled gateway in build/compiled is measured; `--sources` measures the sources. All endpoints
are one process (bench/backend.c) that listens on many ports. The parts are:

requests     CPU time per request, by number of endpoints. The sizes are measured in turn, in short
             periods. A ratio compares a size with the smallest one in the same round; its median
             and 95% interval are printed. The CPU time of an idle gateway is subtracted
background   CPU time of an idle gateway, for health checks, metric scrapes and clean-up
stalls       longest turn of the event loop while a page is built or a configuration is changed, in
             processor time
connections  memory and CPU time of idle client connections
streams      memory, CPU time and added delay of open streams, by their number
workers      the same for streams that three processes share
trickle      CPU time of 50 requests per second, beside nginx's
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median

import uvloop
from compared_systems import (
    COMPILED,
    ROOT,
    backend,
    backend_urls,
    build_tools,
    free_base,
    start,
)
from confidence_intervals import median_interval
from scale_streams import ENGINES, Bench, measure_connections, measure_streams, measure_workers
from scale_systems import NGINX, describe_conditions, idle_share, system_of, verdict
from scale_trickle import measure_trickle
from traffic_cells import Pace, chat_body, drive, prompt_tree, write_bodies

POLICIES = ("round_robin", "prefix_aware", "priced")
PARTS = (*("requests", "background", "stalls", "connections", "streams", "workers", "trickle"),)
QUESTION = chat_body("How does a water wheel work? ################", stream=False)
CONNECTIONS = 32
WORKERS = 3
MAX_BACKGROUND = 0.1


def measure_requests(
    sizes: list[int], policy: str, rounds: int, window_ms: int, home: Path
) -> None:
    """Print the CPU time per request for each number of endpoints, and its ratio to the first
    one.
    """
    base = free_base(max(sizes))
    bodies_of = prompt_tree(2_000, random.Random(2_000)) if policy in POLICIES[1:] else [QUESTION]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-scale-")))
        stack.enter_context(backend(base, max(sizes)))
        bodies = write_bodies(work / "bodies", bodies_of)
        running = {}
        for index, size in enumerate(sizes):
            port = base + max(sizes) + 300 * index
            system = system_of(policy, backend_urls(base, size), port, home)
            running[size] = start(system, work, wait_s=90)
            stack.callback(running[size].stop)
        idle = {size: idle_share(running[size].pids, 4.0) for size in sizes}
        costs: dict[int, list[float]] = {size: [] for size in sizes}
        for number in range(rounds + 1):
            for size in sizes:
                pace = Pace(window_ms, 500)
                report = drive(running[size], pace, bodies, mode="closed", connections=CONNECTIONS)
                busy_s = report["cpu_s"] - idle[size] * report["window_s"]
                if number:  # the first round fills the index and opens connections
                    costs[size].append(busy_s / report["requests"] * 1e6)
    for size in sizes:
        ratios = [cost / first for cost, first in zip(costs[size], costs[sizes[0]], strict=True)]
        low, middle, high = median_interval(ratios)
        print(
            f"{policy:13} {size:5} endpoints  {median(costs[size]):6.1f} us/request  "
            f"{middle:.2f}x ({low:.2f} to {high:.2f})  background {100 * idle[size]:.1f} %",
            flush=True,
        )


def measure_background(sizes: list[int], rounds: int, home: Path) -> None:
    """Print the CPU use of a gateway without requests, for each number of endpoints."""
    for size in sizes:
        base = free_base(size)
        with tempfile.TemporaryDirectory(prefix="penstock-scale-") as work, backend(base, size):
            system = system_of("prefix_aware", backend_urls(base, size), base + size, home)
            running = start(system, Path(work), wait_s=90)
            try:
                time.sleep(2.0)
                shares = [idle_share(running.pids) for _ in range(rounds)]
            finally:
                running.stop()
        low, middle, high = (100 * share for share in median_interval(shares))
        print(
            f"background    {size:5} endpoints  {middle:5.2f} % of a core ({low:.2f} to "
            f"{high:.2f}); {verdict(middle, 100 * MAX_BACKGROUND)}",
            flush=True,
        )


def measure_stalls(size: int, work: Path, is_profiled: bool, home: Path) -> None:
    """Print how long the event loop of a gateway with `size` endpoints is blocked."""
    # The gateway runs in this process, from the folder that is measured.
    sys.path.insert(0, str(home))
    from scale_stalls import REPLACED, measure_turns

    base = free_base(size + REPLACED)
    with backend(base, size + REPLACED):
        uvloop.run(measure_turns(size, base, work, is_profiled))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--endpoints",
        default="4,64,256,1024",
        help="numbers of endpoints to measure, separated by commas; ratios are to the first one",
    )
    parser.add_argument(
        "--policies",
        default=",".join((*POLICIES, NGINX)),
        help="routing policies to measure, comma-separated; nginx is measured for comparison "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help="parts to measure, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="number of rounds; each measures every size for one period (default: %(default)s)",
    )
    parser.add_argument(
        "--window-ms",
        type=int,
        default=1500,
        help="length of a measured period of requests in milliseconds (default: %(default)s)",
    )
    parser.add_argument("--idle", type=int, default=9_000, help="number of idle client connections")
    _add_stream_options(parser)
    profile_help = "print which functions took the time of the longest turns (part `stalls`)"
    parser.add_argument("--profile", action="store_true", help=profile_help)
    parser.add_argument(
        "--sources", action="store_true", help="measure the sources instead of build/compiled"
    )
    return parser.parse_args()


def _add_stream_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--streams",
        default="2000,5000,9000",
        help="numbers of concurrent streams to measure, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk-ms",
        type=int,
        default=180,
        help="time between two chunks of a stream in milliseconds (default: %(default)s)",
    )
    parser.add_argument(
        "--equal-rate",
        action="store_true",
        help="give smaller numbers of streams proportionally less time between two chunks, so "
        "that all numbers have the same number of chunks per second",
    )
    parser.add_argument(
        "--workers-streams",
        type=int,
        default=20_000,
        help=f"number of streams that {WORKERS} processes share (default: %(default)s)",
    )
    parser.add_argument(
        "--workers-chunk-ms",
        type=int,
        default=1_000,
        help="time between two chunks of each of these streams (default: %(default)s)",
    )


def main() -> None:
    options = _options()
    sizes = [int(size) for size in options.endpoints.split(",")]
    parts, home = options.parts.split(","), ROOT if options.sources else COMPILED
    if not (home / "gateway").is_dir():
        raise SystemExit(f"{home} has no gateway; run `make compiled`, or use --sources")
    build_tools()
    print(describe_conditions(home), flush=True)
    if "requests" in parts:
        for policy in options.policies.split(","):
            measure_requests(sizes, policy, options.rounds, options.window_ms, home)
    if "background" in parts:
        measure_background(sizes, options.rounds, home)
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as folder:
        if "stalls" in parts:
            measure_stalls(max(sizes), Path(folder), options.profile, home)
        _measure_connections_and_streams(options, parts, Path(folder), home)
    print(describe_conditions(home), flush=True)


def _measure_connections_and_streams(
    options: argparse.Namespace, parts: list[str], work: Path, home: Path
) -> None:
    base = free_base(ENGINES)
    bench = Bench(base, count(base + 100), work, home)
    with backend(base, ENGINES):
        if "connections" in parts:
            measure_connections(options.idle, bench)
        if "streams" in parts:
            counts = [int(number) for number in options.streams.split(",")]
            measure_streams(
                counts,
                options.rounds,
                options.chunk_ms,
                bench,
                has_equal_rate=options.equal_rate,
            )
        if "workers" in parts:
            measure_workers(options.workers_streams, WORKERS, options.workers_chunk_ms, bench)
        if "trickle" in parts:
            measure_trickle(options.rounds, base, work, home)


if __name__ == "__main__":
    main()
