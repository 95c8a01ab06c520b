"""`make soak`: runs load and faults for minutes, and checks that no resources leak.

    python -m bench.load.soak [--minutes 10] [--warm-up 10] [--users 12] [--speed 2] [--seed 1]
                              [--json FILE]

Mock engines, a gateway and clients run on 127.0.0.1. Clients stream, disconnect, and send long
prompts and invalid requests. Engines are killed, frozen, drained, added and removed.

Requirements:

- every answer is correct, except streams whose engine failed
- at the end no resources are in use, and the numbers of tasks and file descriptors are as before
- in the second half, resident memory does not grow by more than 0.5 MB per hour: the requirement is
  missed if the whole 95% interval of the growth is above that

The first half is printed only for comparison, because memory grows for tens of minutes even without
a leak: caches fill, and free memory becomes fragmented. If the interval includes 0.5 MB per hour,
the run was too short, which is printed.

Exit status: 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from time import monotonic

import aiohttp
import msgspec

from bench.load.growth_rate import Point, Slope, slope
from bench.load.soak_churn import Churn
from bench.load.soak_clients import Clients
from bench.load.soak_processes import LEASE_S, SoakFleet, run_fleet

MB_PER_HOUR = 1e6 / 3600  # bytes per second in one megabyte per hour
MAX_GROWTH = 0.5 * MB_PER_HOUR
REST_WITHIN_S = 3 * LEASE_S
MARGIN_S = 300.0
MAX_MISSES_SHOWN = 20


class SoakResult(msgspec.Struct, frozen=True):
    """The results of one soak test, which runs load and faults for minutes.

    fates          number of requests by kind and outcome
    churn          number of faults by name
    unexpected     descriptions of wrong answers
    in_use         number of resources still in use at the end, by name
    stable_gauges  numbers of tasks and of file descriptors, each as (before, after)
    first_half     growth of resident memory in the first half of the measurement, in bytes per
                   second
    second_half    the same in the second half
    rss            (seconds since the start, resident bytes) of each sample, including the warm-up
    """

    minutes: float
    fates: dict[str, dict[str, int]]
    churn: dict[str, int]
    unexpected: list[str]
    in_use: dict[str, float]
    stable_gauges: dict[str, tuple[float, float]]
    first_half: Slope
    second_half: Slope
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
        if self.second_half.low > MAX_GROWTH:
            misses.append(
                "resident memory still grows in the second half, by at least "
                f"{self.second_half.low / MB_PER_HOUR:.2f} MB per hour"
            )
        return misses

    @property
    def is_growth_unclear(self) -> bool:
        """Return whether the run is too short to tell if memory grows by more than allowed."""
        return self.second_half.low <= MAX_GROWTH < self.second_half.high


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
        *slopes_of_halves([point for point in rss if point[0] >= warm_up_s]),
        rss,
    )


def slopes_of_halves(samples: Sequence[Point]) -> tuple[Slope, Slope]:
    """Return how fast the samples grow in the first and in the second half of their time.

    A leak grows in both halves, a warm-up only in the first one.
    """
    middle_s = (samples[0][0] + samples[-1][0]) / 2
    return (
        slope([point for point in samples if point[0] < middle_s]),
        slope([point for point in samples if point[0] >= middle_s]),
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
    first, last = result.rss[0][1] / 1e6, result.rss[-1][1] / 1e6
    yield f"resident memory {first:.1f} to {last:.1f} MB, including the warm-up"
    for name, half in (("first", result.first_half), ("second", result.second_half)):
        rates = [rate / MB_PER_HOUR for rate in (half.per_s, half.low, half.high)]
        growth = "{:+.2f} MB per hour, 95 % interval {:+.2f} to {:+.2f}".format(*rates)
        yield f"{name} half after the warm-up {growth}"
    if result.is_growth_unclear:
        yield "too short to tell whether memory grows by less than 0.5 MB per hour"
    yield from result.misses[:MAX_MISSES_SHOWN] or ["all requirements are met"]
    if len(result.misses) > MAX_MISSES_SHOWN:
        yield f"and {len(result.misses) - MAX_MISSES_SHOWN} more"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.soak",
        description="Run a gateway under load and faults, and measure its leaks.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="length of the measurement in minutes, after the warm-up",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=10.0,
        help="length of the warm-up in minutes, in which caches fill",
    )
    parser.add_argument(
        "--users", type=int, default=12, help="number of concurrent clients (default: %(default)s)"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=2.0,
        help="factor by which the mock engines are faster than real time (default: %(default)s)",
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
