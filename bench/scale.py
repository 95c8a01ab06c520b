"""`make bench-scale`: measures how the gateway's cost grows with endpoints, connections and
streams.

    python bench/scale.py --endpoints 4,1024 --rounds 3 --parts requests,background

All endpoints are one process (bench/backend.c) that listens on many ports. The parts are:

requests     CPU time per request, by number of endpoints. The sizes are measured in turn, in short
             periods. A ratio compares a size with the smallest one in the same round; its median
             and 95% interval are printed. The CPU time of an idle gateway is subtracted
background   CPU time of an idle gateway, for health checks, metric scrapes and clean-up
stalls       longest turn of the event loop while a page is built or a configuration is changed, in
             processor time
connections  memory and CPU time of idle client connections
streams      memory of open streams, by their number
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from compared_systems import (
    ADMIN,
    ROOT,
    Running,
    System,
    backend,
    backend_urls,
    build_tools,
    cpu_s,
    free_base,
    nginx_command,
    penstock_command,
    rss_bytes,
    start,
)
from confidence_intervals import median_interval
from traffic_cells import Pace, chat_body, drive, prompt_tree, rss_per_stream_kib, write_bodies

sys.path.insert(0, str(ROOT))

from gateway.app import App
from gateway.config import load_config

POLICIES = ("round_robin", "prefix_aware", "priced")
NGINX = "nginx"
PARTS = ("requests", "background", "stalls", "connections", "streams")
PAGES = ("/metrics", "/live", "/endpoints", "/config")
QUESTION = chat_body("How does a water wheel work? ################", stream=False)
BACKGROUND_S = 8.0
CONNECTIONS = 32
REPLACED = 256
"""Number of endpoints that are replaced in the part `stalls`."""

WARM_UP = 3
"""Number of requests per endpoint before the first measured period."""


def system_of(policy: str, base: int, port: int, endpoints: int) -> System:
    """Return the benchmarked system: Penstock or nginx, in front of `endpoints` endpoints."""
    urls = backend_urls(base, endpoints)
    if policy == NGINX:
        return System(NGINX, "round_robin", port, lambda work, at: nginx_command(urls, work, at))
    write = penstock_command(policy, urls)

    def command(work: Path, at: int) -> list[str]:
        line = write(work, at)
        with Path(line[-1]).open("a") as config:
            config.write("limits: {connections: 20000, connections_per_address: 20000}\n")
        return line

    return System("penstock", policy, port, command)


def measure_requests(sizes: list[int], policy: str, rounds: int, window_ms: int) -> None:
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
            system = system_of(policy, base, base + max(sizes) + 300 * index, size)
            running[size] = start(system, work, wait_s=90)
            stack.callback(running[size].stop)
        idle = {size: background(running[size].pids, 4.0) for size in sizes}
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


def _window(running: Running, pace: Pace, bodies: Path) -> dict[str, Any]:
    return drive(running, pace, bodies, mode="closed", connections=CONNECTIONS)


def background(pids: list[int], seconds: float = BACKGROUND_S) -> float:
    """Return the CPU time that these processes use without requests, as a share of one core."""
    began, at = cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pids) - began) / (time.monotonic() - at)


def measure_background(sizes: list[int]) -> None:
    """Print the CPU use of a gateway without requests, for each number of endpoints."""
    for size in sizes:
        base = free_base(size)
        with tempfile.TemporaryDirectory(prefix="penstock-scale-") as work, backend(base, size):
            running = start(
                system_of("prefix_aware", base, base + size, size), Path(work), wait_s=90
            )
            try:
                time.sleep(2.0)
                share = background(running.pids)
            finally:
                running.stop()
        print(f"background    {size:5} endpoints  {100 * share:5.2f} % of a core", flush=True)


class LoopTurns:
    """Measures for how long a turn of the event loop blocks all others: its longest turn.

    The time is processor time in seconds, so that other load on the machine does not count. It is
    measured by a callback in every turn, so the loop never waits.

    is_profiled  whether each turn is profiled too, which makes it longer
    profile      the profile of the longest turn
    """

    def __init__(self, is_profiled: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._profiler = cProfile.Profile() if is_profiled else None
        self.profile = self._profiler
        self.longest_s = 0.0
        self._last = time.thread_time()
        self._turn()

    def _turn(self) -> None:
        took_s = time.thread_time() - self._last
        if self._profiler is not None:
            self._profiler.disable()
        if took_s > self.longest_s:
            self.longest_s, self.profile = took_s, self._profiler
        if self._profiler is not None:
            self._profiler = cProfile.Profile()
            self._profiler.enable()
        self._last = time.thread_time()
        self._loop.call_soon(self._turn)

    async def during(self, action: Callable[[], Awaitable[None]]) -> float:
        """Await an action; return for how many milliseconds it blocked the event loop at most."""
        await asyncio.sleep(0.05)
        self.longest_s = 0.0
        await action()
        await asyncio.sleep(0.05)
        return self.longest_s * 1e3

    def print_profile(self) -> None:
        """Print the functions that took most of the longest turn."""
        if self.profile is not None:
            pstats.Stats(self.profile).sort_stats("cumulative").print_stats(25)


async def _get(port: int, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
    head = await reader.readline()
    assert b" 200 " in head, head
    while await reader.read(1 << 16):
        pass
    writer.close()


async def measure_stalls(size: int, base: int, work: Path, is_profiled: bool) -> None:
    """Print how long a gateway's event loop is blocked by pages and changes, in milliseconds.

    The test engine must listen on more ports than `size`, for the endpoints that are added.
    """
    port, urls = base + size + REPLACED, backend_urls(base, size + REPLACED)
    text = Path(penstock_command("prefix_aware", urls[:size])(work, port)[-1])
    app = App(load_config(text, {}))
    began = time.monotonic()
    await app.start()
    print(f"start         {size:5} endpoints  {time.monotonic() - began:.1f} s", flush=True)
    turns = LoopTurns(is_profiled)
    actions = {"no request": lambda: asyncio.sleep(5.0)}
    actions |= {page: partial(_get, port + ADMIN, page) for page in PAGES}
    actions["discovery"] = app.swap.rebuild
    for name, policy, used in (
        ("reload, priced", "priced", urls[:size]),
        ("reload, prefix_aware", "prefix_aware", urls[:size]),
        (f"{REPLACED} new endpoints", "prefix_aware", urls[REPLACED:]),
    ):
        changed = Path(penstock_command(policy, used)(work, port)[-1]).read_bytes()
        actions[name] = partial(_reload, app, changed)
    try:
        for name, action in actions.items():
            longest_ms = await turns.during(action)
            print(f"stall         {size:5} endpoints  {name:20} {longest_ms:6.1f} ms", flush=True)
            turns.print_profile()
    finally:
        await app.stop()


async def _reload(app: App, text: bytes) -> None:
    # Apply a configuration, and wait until all of its endpoints are in rotation.
    outcome = await app.reloader.put(text, "bench")
    assert outcome.result == "applied", outcome
    table = app.gateway.endpoints
    while app.swap.retiring or not all(live.load.is_available for live in table.all()):
        await asyncio.sleep(0.01)


async def _open(port: int, count: int) -> list[asyncio.StreamWriter]:
    body, writers = QUESTION, list[asyncio.StreamWriter]()

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in head, head
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        writers.append(writer)

    for begin in range(0, count, 100):
        await asyncio.gather(*(one() for _ in range(min(100, count - begin))))
    return writers


async def _hold(port: int, pids: list[int], count: int) -> None:
    await _open(port, 100)  # the first connections also allocate shared memory: do not count it
    await asyncio.sleep(2.0)
    memory, idle = rss_bytes(pids), background(pids)
    writers = await _open(port, count)
    await asyncio.sleep(2.0)
    more, busy = rss_bytes(pids) - memory, background(pids)
    print(
        f"connections   {len(writers):5} idle       {more / count / 1024:5.2f} KiB each, "
        f"{100 * (busy - idle):5.2f} % of a core more than the {100 * idle:.2f} % before",
        flush=True,
    )


def measure_connections(count: int, base: int, work: Path) -> None:
    running = start(system_of("prefix_aware", base, base + 100, 4), work)
    try:
        asyncio.run(_hold(base + 100, running.pids, count))
    finally:
        running.stop()


def measure_streams(counts: list[int], base: int, work: Path) -> None:
    """Print the gateway's memory per open stream, for each number of streams.

    Each is measured with a new process.
    """
    for count in counts:
        running = start(system_of("prefix_aware", base, base + 100, 4), work)
        try:
            kib = rss_per_stream_kib(running, Pace(), work, count)["rss"]
        finally:
            running.stop()
        print(f"streams       {count:5} open       {kib:5.2f} KiB each", flush=True)


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
        help="length of a measured period in milliseconds (default: %(default)s)",
    )
    parser.add_argument("--idle", type=int, default=9_000, help="number of idle client connections")
    parser.add_argument(
        "--streams", default="500,1000,2000", help="numbers of concurrent streams to measure"
    )
    profile_help = "print which functions took the time of the longest turns (part `stalls`)"
    parser.add_argument("--profile", action="store_true", help=profile_help)
    return parser.parse_args()


def main() -> None:
    options = _options()
    sizes = [int(size) for size in options.endpoints.split(",")]
    parts = options.parts.split(",")
    build_tools()
    if "requests" in parts:
        for policy in options.policies.split(","):
            measure_requests(sizes, policy, options.rounds, options.window_ms)
    if "background" in parts:
        measure_background(sizes)
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as folder:
        work = Path(folder)
        if "stalls" in parts:
            base = free_base(max(sizes) + REPLACED)
            with backend(base, max(sizes) + REPLACED):
                uvloop.run(measure_stalls(max(sizes), base, work, options.profile))
        base = free_base()
        with backend(base):
            if "connections" in parts:
                measure_connections(options.idle, base, work)
            if "streams" in parts:
                measure_streams([int(count) for count in options.streams.split(",")], base, work)


if __name__ == "__main__":
    main()
