"""`make soak`: ten minutes of everything at once, and what is left when all have gone: nothing.

    python -m bench.load.soak [--minutes 10] [--warm-up 10] [--users 12] [--speed 2] [--seed 1] [--json FILE]

Mock groups, pairs that split requests among them, a gateway and its clients, all real on 127.0.0.1. Clients stream,
wait, leave, send long prompts and nonsense, while groups are killed, frozen, drained, added and removed. Must hold: all
answers are right to the word, or streams that ended with their group; after quiesce nobody holds anything, tasks and
descriptors are as before; resident memory grows by 0.5 MB an hour at most, extrapolated from the minutes behind the
warm-up, in which what is bounded fills up. Exit status: 1 when one of them does not.
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
from bench.load.soak_house import LEASE_S, House, house

MB_PER_HOUR = 1e6 / 3600  # in bytes a second
MOST_GROWTH = 0.5 * MB_PER_HOUR
REST_WITHIN_S = 3 * LEASE_S
MARGIN_S = 300.0
MOST_SHOWN = 20


class Found(msgspec.Struct, frozen=True):
    """What a soak showed. `held`: after quiesce, by name; `kept`: tasks and descriptors before and after; `growth`: of
    resident memory, bytes a second; `rss`: (seconds since the start, bytes), the warm-up included."""

    minutes: float
    fates: dict[str, dict[str, int]]
    churn: dict[str, int]
    unexpected: list[str]
    held: dict[str, float]
    kept: dict[str, tuple[float, float]]
    growth: Slope
    rss: list[Point]

    @property
    def misses(self) -> list[str]:
        """What does not hold, in words."""
        found = [f"unexpected: {each}" for each in self.unexpected]
        found += [f"still held: {name} {count:g}" for name, count in self.held.items() if count]
        found += [
            f"{name} went from {old:g} to {new:g}"
            for name, (old, new) in self.kept.items()
            if new > old
        ]
        if self.growth.per_s > MOST_GROWTH:
            found.append(
                f"resident memory grows by {self.growth.per_s / MB_PER_HOUR:.2f} MB an hour"
            )
        return found


def main() -> int:
    options = _options()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # whoever ends it leaves no processes behind
    found = asyncio.run(_soak(options))
    print("\n".join(_lines(found)))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return 1 if found.misses else 0


async def _soak(options: argparse.Namespace) -> Found:
    warm_up_s, rng = options.warm_up * 60, Random(options.seed)
    length_s = warm_up_s + options.minutes * 60
    async with house(options.speed, length_s + MARGIN_S) as running:
        before = await running.kept()
        churn = Churn(running, options.speed, rng)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            clients = Clients(running.gateway.url, http, churn.excuses)
            rss = await _work(running, churn, clients, options.users, rng, length_s)
        held, after = await _at_rest(running), await running.kept()
    return Found(
        options.minutes,
        _by_kind(clients.fates),
        dict(churn.done),
        clients.unexpected,
        held,
        {name: (before[name], after[name]) for name in before},
        slope([(at, value) for at, value in rss if at >= warm_up_s]),
        rss,
    )


async def _work(
    running: House, churn: Churn, clients: Clients, users: int, rng: Random, length_s: float
) -> list[Point]:
    """Load and churn for so long, then to the end of what has begun; the gateway's memory meanwhile."""
    stop, rss = asyncio.Event(), list[Point]()
    async with asyncio.TaskGroup() as group:
        asyncio.get_running_loop().call_later(length_s, stop.set)
        group.create_task(churn.work(stop))
        group.create_task(clients.work(users, stop, rng))
        began = monotonic()
        while not stop.is_set():
            rss.append((round(monotonic() - began, 3), float(running.gateway.resident_bytes)))
            await asyncio.sleep(1.0)
    return rss


async def _at_rest(running: House) -> dict[str, float]:
    """What is held as soon as nothing is, or when that has taken too long: leases run out by themselves."""
    ends = monotonic() + REST_WITHIN_S
    while any((held := await running.held()).values()) and monotonic() < ends:
        await asyncio.sleep(0.5)
    return held


def _by_kind(fates: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (kind, fate), count in sorted(fates.items()):
        found.setdefault(kind, {})[fate] = count
    return found


def _lines(found: Found) -> Iterator[str]:
    """Tables for people."""
    for kind, fates in found.fates.items():
        yield f"{kind:28} " + ", ".join(f"{count} {fate}" for fate, count in fates.items())
    yield "churn: " + ", ".join(f"{count} {name}" for name, count in sorted(found.churn.items()))
    for name, count in found.held.items():
        yield f"{name:52} {count:8g} held"
    for name, (old, new) in found.kept.items():
        yield f"{name:52} {old:8g} before {new:8g} after"
    growth = [
        rate / MB_PER_HOUR for rate in (found.growth.per_s, found.growth.low, found.growth.high)
    ]
    first, last = found.rss[0][1] / 1e6, found.rss[-1][1] / 1e6
    yield f"resident memory {first:.1f} to {last:.1f} MB, the warm-up included"
    yield "behind the warm-up {:+.2f} MB an hour, {:+.2f} to {:+.2f} in 95 of 100 redrawings".format(
        *growth
    )
    yield from found.misses[:MOST_SHOWN] or ["all of it holds"]
    if len(found.misses) > MOST_SHOWN:
        yield f"and {len(found.misses) - MOST_SHOWN} more"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.soak", description="Load and churn, and what is left of them."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="behind the warm-up")
    parser.add_argument(
        "--warm-up", type=float, default=10.0, help="minutes until what is bounded is full"
    )
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--speed", type=float, default=2.0, help="of the mock groups")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
