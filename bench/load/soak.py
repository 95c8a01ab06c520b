"""`make soak`: run load and faults for minutes, and check that no resources leak.

    python -m bench.load.soak [--minutes 10] [--warm-up 10] [--users 12] [--speed 2] [--seed 1]
                              [--json FILE]

Mock engines, a gateway and clients run on 127.0.0.1. Clients stream, disconnect, and send long
prompts and invalid requests, while engines are killed, frozen, drained, added and removed.
Requirements:

- every answer is correct, except streams whose engine failed
- at the end no resources are in use, and tasks and file descriptors are as before
- resident memory grows by at most 0.5 MB per hour after the warm-up, in which bounded caches fill

Exit status: 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import monotonic

import aiohttp
import msgspec

from bench.load.slope import Point, Slope, slope
from bench.load.soak_churn import Churn
from bench.load.soak_clients import Clients
from bench.load.soak_house import LEASE_S, SoakFleet, run_fleet

MB_PER_HOUR = 1e6 / 3600  # in bytes per second
MAX_GROWTH = 0.5 * MB_PER_HOUR
REST_WITHIN_S = 3 * LEASE_S
MARGIN_S = 300.0
MAX_MISSES_SHOWN = 20


class SoakResult(msgspec.Struct, frozen=True):
    """The results of a soak test (load and faults for minutes).

    fates          number of requests by kind and outcome
    churn          number of disturbances by name
    unexpected     descriptions of wrong answers
    in_use         number of resources still in use at the end, by name
    stable_gauges  numbers of tasks and of file descriptors, each as (before, after)
    growth         growth of resident memory after the warm-up, in bytes per second
    rss            (seconds since the start, resident bytes), including the warm-up
    """

    minutes: float
    fates: dict[str, dict[str, int]]
    churn: dict[str, int]
    unexpected: list[str]
    in_use: dict[str, float]
    stable_gauges: dict[str, tuple[float, float]]
    growth: Slope
    rss: list[Point]

    @property
    def misses(self) -> list[str]:
        misses = [f"unexpected: {answer}" for answer in self.unexpected]
        misses += [
            f"still in use: {name} {count:g}" for name, count in self.in_use.items() if count
        ]
        misses += [
            f"{name} went from {old:g} to {new:g}"
            for name, (old, new) in self.stable_gauges.items()
            if new > old
        ]
        if self.growth.per_s > MAX_GROWTH:
            misses.append(
                f"resident memory grows by {self.growth.per_s / MB_PER_HOUR:.2f} MB per hour"
            )
        return misses


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all processes are ended
    result = asyncio.run(_soak(options))
    print("\n".join(_format_result(result)))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return 1 if result.misses else 0


async def _soak(options: argparse.Namespace) -> SoakResult:
    warm_up_s, rng = options.warm_up * 60, Random(options.seed)
    length_s = warm_up_s + options.minutes * 60
    async with run_fleet(options.speed, length_s + MARGIN_S) as running:
        before = await running.stable_gauges()
        churn = Churn(running, options.speed, rng)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            clients = Clients(running.gateway.url, http, churn.excuses)
            rss = await _run_load(running, churn, clients, options.users, rng, length_s)
        in_use, after = await _await_rest(running), await running.stable_gauges()
    return SoakResult(
        options.minutes,
        _by_kind(clients.fates),
        dict(churn.done),
        clients.unexpected,
        in_use,
        {name: (before[name], after[name]) for name in before},
        slope([(time_s, value) for time_s, value in rss if time_s >= warm_up_s]),
        rss,
    )


async def _run_load(
    running: SoakFleet, churn: Churn, clients: Clients, users: int, rng: Random, length_s: float
) -> list[Point]:
    # Run load and faults for `length_s` seconds; return samples of the gateway's memory.
    stop, rss = asyncio.Event(), list[Point]()
    async with asyncio.TaskGroup() as group:
        asyncio.get_running_loop().call_later(length_s, stop.set)
        group.create_task(churn.work(stop))
        group.create_task(clients.work(users, stop, rng))
        started = monotonic()
        while not stop.is_set():
            rss.append((round(monotonic() - started, 3), float(running.gateway.resident_bytes)))
            await asyncio.sleep(1.0)
    return rss


async def _await_rest(running: SoakFleet) -> dict[str, float]:
    # Wait until no resources are in use, at most until KV leases have expired.
    #
    # Returns the resources that are still in use, by name.
    ends = monotonic() + REST_WITHIN_S
    while any((in_use := await running.in_use()).values()) and monotonic() < ends:
        await asyncio.sleep(0.5)
    return in_use


def _by_kind(fates: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, fate), count in sorted(fates.items()):
        by_kind.setdefault(kind, {})[fate] = count
    return by_kind


def _format_result(result: SoakResult) -> Iterator[str]:
    for kind, fates in result.fates.items():
        yield f"{kind:28} " + ", ".join(f"{count} {fate}" for fate, count in fates.items())
    yield "churn: " + ", ".join(f"{count} {name}" for name, count in sorted(result.churn.items()))
    for name, count in result.in_use.items():
        yield f"{name:52} {count:8g} in use"
    for name, (old, new) in result.stable_gauges.items():
        yield f"{name:52} {old:8g} before {new:8g} after"
    growth = [
        rate / MB_PER_HOUR for rate in (result.growth.per_s, result.growth.low, result.growth.high)
    ]
    first, last = result.rss[0][1] / 1e6, result.rss[-1][1] / 1e6
    yield f"resident memory {first:.1f} to {last:.1f} MB, including the warm-up"
    yield "after the warm-up {:+.2f} MB per hour, 95 % interval {:+.2f} to {:+.2f}".format(*growth)
    yield from result.misses[:MAX_MISSES_SHOWN] or ["all requirements are met"]
    if len(result.misses) > MAX_MISSES_SHOWN:
        yield f"and {len(result.misses) - MAX_MISSES_SHOWN} more"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.soak",
        description="Run a gateway under load and faults, and measure its leaks.",
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="minutes of the measurement, after the warm-up"
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=10.0,
        help="minutes before the measurement, in which caches fill",
    )
    parser.add_argument(
        "--users", type=int, default=12, help="number of concurrent clients (default: %(default)s)"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=2.0,
        help="factor by which the mock engines are faster than real time",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="random seed of the load and the faults (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="file to which all results are also written, as JSON",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
