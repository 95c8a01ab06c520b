"""The part `trickle` of `make bench-scale`: the CPU time of few requests per second, beside nginx.

A gateway that answers few requests wakes up for each of them, and its code and data have left the
processor's caches by then. So a request costs more than at a high rate.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from compared_systems import DEFAULT, Running, backend_urls, cpu_s, start
from confidence_intervals import median_interval
from scale_systems import NGINX, system_of, verdict
from traffic_cells import Pace, chat_body, drive, write_bodies

QUESTION = chat_body("How does a water wheel work? ################", stream=False)
RATE = 50.0
PERIOD_MS = 4_000
OURS = "penstock"
MAX_RATIO = 2.5


def _idle_s(running: Running) -> float:
    # Return the CPU time per second without requests.
    began, at = cpu_s(running.pids), time.monotonic()
    time.sleep(PERIOD_MS / 1e3)
    return (cpu_s(running.pids) - began) / (time.monotonic() - at)


def _added_s(running: Running, bodies: Path, idle: float) -> float:
    # Return the additional CPU time per request at RATE requests per second.
    report = drive(running, Pace(PERIOD_MS, 500), bodies, mode="open", rate=RATE)
    return float((report["cpu_s"] - idle * report["window_s"]) / report["requests"])


def measure_trickle(rounds: int, base: int, work: Path, home: Path) -> None:
    """Print the CPU time per request at RATE requests per second, and its ratio to nginx's.

    Both gateways run all the time. Each round measures both, idle and with requests, in random
    order. The CPU time of the idle gateway is subtracted.
    """
    rng = random.Random(1)
    idle: dict[str, list[float]] = {OURS: [], NGINX: []}
    added: dict[str, list[float]] = {OURS: [], NGINX: []}
    with ExitStack() as stack:
        bodies = write_bodies(work / "trickle", [QUESTION])
        running = {}
        for index, (name, policy) in enumerate(((OURS, DEFAULT), (NGINX, NGINX))):
            system = system_of(policy, backend_urls(base), base + 200 + index, home)
            running[name] = start(system, work)
            stack.callback(running[name].stop)
        for number in range(rounds + 1):
            for name in rng.sample(list(running), 2):
                without = _idle_s(running[name])
                more = _added_s(running[name], bodies, without)
                if number:  # the first round opens connections
                    idle[name].append(without)
                    added[name].append(more)
    for name in running:
        low, middle, high = (1e6 * each for each in median_interval(added[name]))
        print(
            f"trickle       {name:9} {middle:6.1f} us/request ({low:.1f} to {high:.1f}) at "
            f"{RATE:.0f} requests/s, idle {100 * median(idle[name]):.2f} % of a core",
            flush=True,
        )
    low, middle, high = median_interval(
        [ours / nginx for ours, nginx in zip(added[OURS], added[NGINX], strict=True)]
    )
    print(
        f"trickle       penstock/nginx {middle:.2f} ({low:.2f} to {high:.2f}); "
        f"{verdict(middle, MAX_RATIO)}",
        flush=True,
    )
