"""The parts `connections`, `streams` and `workers` of `make bench-scale`.

They measure what idle client connections and open streams cost a gateway.

The test engine writes its clock into each chunk, and the load generator subtracts it from its own
on arrival. The same streams without a gateway show how much of that delay is the measurement's own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from compared_systems import (
    BIN,
    GATEWAY_CORE,
    LOAD_CORE,
    NotMeasurable,
    Running,
    backend,
    backend_urls,
    core_busy_s,
    cpu_s,
    pinned,
    rss_bytes,
    start,
)
from confidence_intervals import fitted_line, median_interval
from scale_systems import idle_share, system_of, verdict
from traffic_cells import Pace, chat_body, drive, paced, write_bodies

QUESTION = chat_body("How does a water wheel work? ################", stream=False)
POLICY = "prefix_aware"
ENGINES = 16  # so that each has some hundreds of streams, as real engines have
RAMP_PER_S = 691
"""Number of streams that are opened per second, while those that are open already cost CPU time."""

SETTLE_S, WINDOW_S = 2.0, 5.0
EDGE_S = 0.5  # part of the load's own window on either side that the CPU time leaves out

MAX_KIB, MAX_GAP_MS, MAX_BEND = 12.0, 2.0, 0.05
"""Goals: memory of a stream, p99 of the added gap, and deviation of CPU time from a line."""


@dataclass(frozen=True)
class StreamLoad:
    """Streams that are open at the same time, and how they are measured.

    count      number of streams
    chunk_ms   time between two chunks of a stream
    window_s   duration of the measured period
    loads      number of load generators among which the streams are divided
    """

    count: int
    chunk_ms: int
    window_s: float
    loads: int = 1

    @property
    def ramp_s(self) -> float:
        return self.count / RAMP_PER_S

    def shares(self) -> list[int]:
        """Return the number of streams of each load generator."""
        return [(self.count + index) // self.loads for index in range(self.loads)]


@dataclass(frozen=True)
class Held:
    """What open streams were measured to cost.

    share        CPU time of the gateway, as a share of one core, less that of the idle gateway
    idle         the CPU time of the idle gateway
    others       share of the gateway's core that other processes used
    kib          memory per stream in KiB
    chunks       number of chunks per second
    delay_ms     p50 and p99 of the time from the engine's write to the arrival of a chunk
    gap_ms       p99 of the increase of that delay from one chunk of a stream to the next
    """

    share: float
    idle: float
    others: float
    kib: float
    chunks: float
    delay_ms: tuple[float, float]
    gap_ms: float


def _load_command(port: int, bodies: Path, load: StreamLoad, count: int) -> list[str]:
    options = {
        "port": port,
        "bodies": bodies,
        "mode": "closed",
        "connections": count,
        "ramp-ms": int(load.ramp_s * 1e3),
        "warmup-ms": int(SETTLE_S * 1e3),
        "window-ms": int((load.window_s + 2 * EDGE_S) * 1e3),
        "stamped": 1,
    }
    pairs = [(f"--{name}", str(value)) for name, value in options.items()]
    return [str(BIN / "load"), *(part for pair in pairs for part in pair)]


def hold(port: int, pids: list[int], load: StreamLoad, work: Path) -> Held:
    """Open streams, and measure what they cost a gateway while they are open.

    port   port of the gateway, or of the engine itself
    pids   the gateway's processes; empty without a gateway
    work   folder for temporary files

    Raises NotMeasurable unless all streams were open during the whole period.
    """
    idle = idle_share(pids, 4.0) if pids else 0.0
    before = rss_bytes(pids)
    endless = paced(1_000_000, load.chunk_ms * 1_000, load.chunk_ms * 1_000, stamp=1)
    bodies = write_bodies(work / "endless", [endless])
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    pinned(LOAD_CORE, _load_command(port, bodies, load, count)),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for count in load.shares()
        ]
        time.sleep(load.ramp_s + SETTLE_S + EDGE_S)
        began, used, busy = time.monotonic(), cpu_s(pids), core_busy_s(GATEWAY_CORE)
        time.sleep(load.window_s)
        took, used = time.monotonic() - began, cpu_s(pids) - used
        busy, memory = core_busy_s(GATEWAY_CORE) - busy, rss_bytes(pids)
        reports = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    _check_all_open(reports, load)
    return Held(
        share=used / took - idle,
        idle=idle,
        others=max(busy - used, 0.0) / took,
        kib=(memory - before) / load.count / 1024,
        chunks=sum(report["events"] / report["window_s"] for report in reports),
        delay_ms=(_worst_ms(reports, "delay_s", "p50"), _worst_ms(reports, "delay_s", "p99")),
        gap_ms=_worst_ms(reports, "gap_s", "p99"),
    )


def _worst_ms(reports: Sequence[dict[str, Any]], samples: str, quantile: str) -> float:
    return max(1e3 * report[samples][quantile] for report in reports)


def _check_all_open(reports: Sequence[dict[str, Any]], load: StreamLoad) -> None:
    failed = {
        kind: sum(report["errors"][kind] for report in reports) for kind in reports[0]["errors"]
    }
    first, last = (sum(report["streaming"][index] for report in reports) for index in (0, 1))
    if any(failed.values()) or min(first, last) < load.count:
        raise NotMeasurable(
            f"of {load.count} streams, {first} were open when the measured period began and {last} "
            f"when it ended; {failed} failed (last HTTP status {reports[0]['bad_status']})"
        )


def _warm_up(running: Running, work: Path) -> None:
    # The first streams also allocate memory that all share: do not count it.
    warm = write_bodies(work / "warm", [paced(4, 1_000, 1_000)])
    drive(running, Pace(1_000, 100), warm, mode="closed", connections=8)
    time.sleep(SETTLE_S)


@dataclass(frozen=True)
class Bench:
    """What the measurements of a run share.

    base   first port of the test engine
    ports  ports for gateways. Each has its own, because closed connections occupy pairs of ports
           for a minute, and there are 28,232 pairs with one port of a gateway
    work   folder for temporary files
    home   folder of the gateway's modules
    """

    base: int
    ports: Iterator[int]
    work: Path
    home: Path

    def start(self, urls: list[str], workers: int = 1) -> Running:
        return start(system_of(POLICY, urls, next(self.ports), self.home, workers), self.work)


def _hold_once(load: StreamLoad, bench: Bench, workers: int) -> Held:
    # Measure with a new gateway, because one that has served streams keeps some of their memory.
    running = bench.start(backend_urls(bench.base, ENGINES * load.loads), workers)
    try:
        _warm_up(running, bench.work)
        return hold(running.system.port, running.pids, load, bench.work)
    finally:
        running.stop()


def measure_streams(
    counts: list[int], rounds: int, chunk_ms: int, bench: Bench, *, has_equal_rate: bool
) -> None:
    """Print the CPU time, memory and added delay of open streams, for each number of streams.

    The numbers are measured in turn.

    chunk_ms        time between two chunks of a stream
    has_equal_rate  whether `chunk_ms` is that of the largest number, and smaller numbers have
                    proportionally less, so that all have the same number of chunks per second
    """
    paces = {
        count: chunk_ms * count // max(counts) if has_equal_rate else chunk_ms for count in counts
    }
    results: dict[int, list[Held]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count, pace_ms in paces.items():
            results[count].append(
                _hold_once(StreamLoad(count, pace_ms, WINDOW_S), bench, workers=1)
            )
    for count, pace_ms in paces.items():
        _print_held(f"streams       {count:5} open", results[count], count, pace_ms)
    direct = hold(bench.base, [], StreamLoad(max(counts), chunk_ms, WINDOW_S), bench.work)
    print(
        f"streams       {max(counts):5} without a gateway: delay p50 {direct.delay_ms[0]:.2f}, "
        f"p99 {direct.delay_ms[1]:.2f}, gap p99 {direct.gap_ms:.2f} ms",
        flush=True,
    )
    if has_equal_rate:
        _print_spread(
            {count: median(held.share / held.chunks for held in results[count]) for count in counts}
        )
    elif len(counts) > 2:
        _print_line({count: median(held.share for held in results[count]) for count in counts})


def _print_spread(costs: dict[int, float]) -> None:
    spread = max(costs.values()) / min(costs.values()) - 1.0
    print(
        f"streams       CPU per chunk differs by {100 * spread:.1f} % between {sorted(costs)}; "
        f"{verdict(100 * spread, 100 * MAX_BEND)}",
        flush=True,
    )


def _print_held(name: str, results: list[Held], count: int, chunk_ms: int) -> None:
    def middle(values: list[float], digits: int = 2) -> str:
        low, value, high = median_interval(values)
        return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    kib, gap = median(held.kib for held in results), median(held.gap_ms for held in results)
    print(
        f"{name}, a chunk every {chunk_ms} ms\n"
        f"    CPU  {middle([100 * (held.share + held.idle) for held in results], 1)} % of a core, "
        f"idle {middle([100 * held.idle for held in results], 1)} %, others "
        f"{middle([100 * held.others for held in results], 1)} %\n"
        f"         {middle([held.share / held.chunks * 1e6 for held in results])} us/chunk, "
        f"{middle([held.share / count * 1e6 for held in results], 1)} us/stream-second\n"
        f"    RSS  {middle([held.kib for held in results])} KiB each; {verdict(kib, MAX_KIB)}\n"
        f"    ms   delay p50 {middle([held.delay_ms[0] for held in results])}, p99 "
        f"{middle([held.delay_ms[1] for held in results])}, gap p99 "
        f"{middle([held.gap_ms for held in results])}; {verdict(gap, MAX_GAP_MS)}",
        flush=True,
    )


def _print_line(shares: dict[int, float]) -> None:
    slope, intercept, bend = fitted_line(shares)
    print(
        f"streams       line through {sorted(shares)}: {slope * 1e6:.1f} us/s per stream and "
        f"{100 * intercept:+.1f} % of a core; points deviate by {100 * bend:.1f} % at most; "
        f"{verdict(100 * bend, 100 * MAX_BEND)}",
        flush=True,
    )


def measure_workers(count: int, workers: int, chunk_ms: int, bench: Bench) -> None:
    """Print what streams cost several processes of one gateway, which share a core.

    Each load generator and each test engine has as many streams as one process can hold.
    """
    load = StreamLoad(count, chunk_ms, WINDOW_S, loads=workers)
    with ExitStack() as stack:
        for index in range(1, workers):
            stack.enter_context(backend(bench.base + ENGINES * index, ENGINES))
        held = _hold_once(load, bench, workers)
    _print_held(f"workers       {count:5} open, {workers} processes", [held], count, chunk_ms)


# ---- idle connections ----


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


async def _hold_idle(port: int, pids: list[int], count: int) -> None:
    first = await _open(port, 100)  # these also allocate memory that all share: do not count it
    await asyncio.sleep(SETTLE_S)
    memory, idle = rss_bytes(pids), idle_share(pids)
    writers = await _open(port, count)
    await asyncio.sleep(SETTLE_S)
    more, busy = rss_bytes(pids) - memory, idle_share(pids)
    for writer in (*first, *writers):
        writer.close()
    print(
        f"connections   {len(writers):5} idle       {more / count / 1024:5.2f} KiB each "
        f"({verdict(more / count / 1024, 6.0)}), {100 * (busy - idle):5.2f} % of a core more than "
        f"the {100 * idle:.2f} % before ({verdict(100 * (busy - idle), 0.2)})",
        flush=True,
    )


def measure_connections(count: int, bench: Bench) -> None:
    """Print the memory and CPU time of client connections without a request."""
    running = bench.start(backend_urls(bench.base))
    try:
        asyncio.run(_hold_idle(running.system.port, running.pids, count))
    finally:
        running.stop()
