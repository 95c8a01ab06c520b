"""`make memory`: measures on virtual time how a gateway's memory grows under load and faults.

    python -m bench.memory_virtual [--requests 100000] [--parts 5] [--users 24] [--seed 1]

Gateway, engines and clients share one process, whose clock jumps to the next timer whenever there
is nothing to do. So hours of load take minutes of CPU time, and the results do not depend on how
busy the machine is.

Clients stream, disconnect and send invalid requests. Engines fail, endpoints are added and removed,
and the configuration changes. After each part of the requests, all of that pauses, because the
requests in progress and the configurations that they hold vary in size, and tracemalloc reports the
memory by source file.

Requirement: from the end of the first part to the end of the last one, no file's memory grows by
more than MAX_GROWTH, and no class by more than MAX_NEW_OBJECTS objects. The structures in BOUNDED
are excepted: they may fill up to their limit, which is printed. Exit status: 1 if it is missed.
"""

from __future__ import annotations

import time

from bench.virtual_loop import VirtualLoop

CLOCK = VirtualLoop()
time.monotonic, time.time = CLOCK.time, CLOCK.wall_time  # before other modules import them

import argparse  # noqa: E402
import asyncio  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import tracemalloc  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from random import Random  # noqa: E402
from typing import NamedTuple  # noqa: E402

from bench.virtual_fleet import VirtualFleet  # noqa: E402
from bench.virtual_traffic import VirtualClients  # noqa: E402
from gateway.app import App  # noqa: E402
from policies.admission.adaptive_session_limit import SessionGate  # noqa: E402

ROOT = Path(__file__).parents[1]
MAX_GROWTH = 64 * 1024
MAX_NEW_OBJECTS = 256
"""Largest growth of the number of objects of a class. Twenty-four requests in progress and 512 that
can be explained make it vary by a hundred.
"""
SESSION_CLASS = "policies.admission.adaptive_session_limit.ActiveSession"
SCRAPE_S = 15.0
SETTLE_S = 300.0  # virtual seconds from the last answer to a measurement
INT_BYTES, SESSION_BYTES, GROWTH_BYTES = 32, 512, 100
"""Bytes of a large integer, of what is remembered of a session, and of a request's bucket counts in
the last minute of the live page.
"""


class Structure(NamedTuple):
    """A data structure of the gateway that takes long to fill, and whose memory may grow.

    files  the source files that allocate its memory
    bound  function that returns its maximum size in bytes, from the gateway and the number of
           requests per minute
    """

    files: tuple[str, ...]
    bound: Callable[[App, float], float]


def sketch_bytes(app: App) -> float:
    """Return the memory of the quantile sketches in bytes. Each has at most 1,268 buckets."""
    families = app.metrics.ttft_seconds, app.metrics.tpot_seconds
    sketches = [child.sketch for family in families for _, child in family.children()]
    return float(sum(sys.getsizeof(each) + INT_BYTES * len(each) for each in sketches))


BOUNDED: Mapping[str, Structure] = {
    "quantile sketches of TTFT and TPOT by model and endpoint": Structure(
        ("gateway/metrics/metric_types.py",), lambda app, _: 2 * sketch_bytes(app)
    ),
    "the live page's samples: the newest sketches, and the last minute's requests": Structure(
        ("gateway/admin/live_metric_samples.py", "gateway/metrics/quantile_sketch.py"),
        lambda app, per_minute: 2 * sketch_bytes(app) + 2 * GROWTH_BYTES * per_minute,
    ),
    "sessions remembered by priced admission": Structure(
        ("gateway/protocol/request/sessions.py", "policies/admission/adaptive_session_limit.py"),
        lambda app, _: SESSION_BYTES * SessionGate().remembered,
    ),
    "the prefix index": Structure(
        ("policies/prefix/prefix_index.py",),
        lambda app, _: 2 * app.config.prefix.index,
    ),
}


class Part(NamedTuple):
    """The memory of the gateway at the end of one part of the load.

    by_file  bytes allocated since the start of the measurement, by source file
    types    number of objects of the gateway's classes that the garbage collector tracks, by class
    """

    requests: int
    by_file: Counter[str]
    types: Counter[str]


def measure(requests: int) -> Part:
    gc.collect()
    by_file: Counter[str] = Counter()
    for statistic in tracemalloc.take_snapshot().statistics("filename"):
        name = statistic.traceback[0].filename
        if name.startswith(f"{ROOT}/"):
            by_file[name.removeprefix(f"{ROOT}/")] += statistic.size
    kinds = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    ours = Counter(kind for kind in kinds if kind.startswith(("gateway.", "policies.")))
    return Part(requests, by_file, ours)


async def run(options: argparse.Namespace) -> tuple[list[Part], dict[str, tuple[float, float]]]:
    """Run the load; return the memory at the end of each part, and the fill of each structure."""
    rng, parts = Random(options.seed), list[Part]()
    files = [file for structure in BOUNDED.values() for file in structure.files]
    assert all((ROOT / file).exists() for file in files), "a file of BOUNDED has been renamed"
    with tempfile.TemporaryDirectory() as work:
        fleet = VirtualFleet(Path(work), rng)
        app = await fleet.start()
        clients = VirtualClients(app.url, rng)
        background = [asyncio.create_task(fleet.disturb()), asyncio.create_task(scrape(app))]
        background.append(asyncio.create_task(clients.run(options.users)))
        tracemalloc.start()
        try:
            for part in range(1, options.parts + 1):
                await clients.sent_at_least(options.requests * part // options.parts)
                async with fleet.undisturbed, clients.paused():
                    await asyncio.sleep(SETTLE_S)
                    parts.append(measure(clients.sent))
                print(f"{clients.sent} requests, {CLOCK.time() / 3600:.2f} hours", flush=True)
            per_minute = 60 * clients.sent / CLOCK.time()
            filled = {
                name: (
                    float(sum(parts[-1].by_file[file] for file in structure.files)),
                    structure.bound(app, per_minute),
                )
                for name, structure in BOUNDED.items()
            }
        finally:
            tracemalloc.stop()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await fleet.stop()
    print("requests:", dict(clients.fates), "disturbances:", dict(fleet.done))
    return parts, filled


async def scrape(app: App) -> None:
    while True:
        app.metrics.render()
        await asyncio.sleep(SCRAPE_S)


def report(parts: list[Part], filled: dict[str, tuple[float, float]]) -> Iterator[str]:
    """Yield a line for each source file or data structure that grew by more than allowed."""
    first, last = parts[0], parts[-1]
    bounded = {file for structure in BOUNDED.values() for file in structure.files}
    for file in sorted(last.by_file, key=lambda name: first.by_file[name] - last.by_file[name]):
        grown = last.by_file[file] - first.by_file[file]
        if abs(grown) > MAX_GROWTH / 8:
            print(
                f"{file:48} {first.by_file[file] / 1024:8.0f} to "
                f"{last.by_file[file] / 1024:.0f} KiB"
            )
        if grown > MAX_GROWTH and file not in bounded:
            yield f"{file} grew by {grown / 1024:.0f} KiB"
    for name, (size, bound) in filled.items():
        print(f"{name}: {size / 1024:.0f} of at most {bound / 1024:.0f} KiB")
        if size > bound + MAX_GROWTH:
            yield f"{name}: {size / 1024:.0f} KiB, above the bound of {bound / 1024:.0f} KiB"
    for kind, added in (last.types - first.types).most_common(8):
        print(f"{kind:48} {first.types[kind]:8} to {last.types[kind]} objects")
        if added > MAX_NEW_OBJECTS and kind != SESSION_CLASS:
            yield f"{kind}: {added} more objects"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=100_000, help="total number of requests of all parts"
    )
    parser.add_argument("--parts", type=int, default=5, help="number of times to measure")
    parser.add_argument("--users", type=int, default=24, help="number of concurrent clients")
    parser.add_argument("--seed", type=int, default=1, help="random seed of load and faults")
    options = parser.parse_args()
    asyncio.set_event_loop(CLOCK)
    misses = list(report(*CLOCK.run_until_complete(run(options))))
    print("\n".join(misses) or "all requirements are met")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
