"""`make attacks`: measures how much each attack of tests/e2e/attackers.py slows regular clients.

    python -m bench.load.attack_cost [--only TEXT] [--pairs N] [--window-ms D] [--rate R]

Regular clients send a steady load through the gateway, in short periods alternately without and
with the attack. The gateway has one core. Clients, engines and the attacker share the other one.

An attack passes if, in the median over the periods,

- the clients' p99 latency at most doubles, or rises by at most 5 ms
- none of their requests fails
- memory grows by at most 32 MiB, plus the configured budget that the attack may fill; this is the
  resident memory plus the kernel memory of the gateway's sockets

Other work on the machine can disturb a period. The lowest p99 of three periods before the attack is
the reference. A pair of periods counts only if its p99 without the attack is at most CALM times the
reference. Results with the attack never exclude a pair. If no pair counts, the attack fails.

All attacks take about fifteen minutes. The growth of all socket memory on the machine
(/proc/net/sockstat) is printed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.load.agent_links import agent, link_times
from tests.e2e.attackers import AGENT_CORPUS, CORPUS, CostlyAttack, attacking
from tests.e2e.gateway_under_attack import (
    MOST_GROWTH,
    Attacked,
    attacked_gateway,
    canned_engine,
    wait_s,
)
from tests.e2e.process_cost import sockstat_bytes

BENCH = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCH))

from compared_systems import (  # noqa: E402
    BIN,
    GATEWAY_CORE,
    LOAD_CORE,
    MODEL,
    backend,
    backend_urls,
    build_tools,
    free_base,
)
from traffic_cells import chat_body, write_bodies  # noqa: E402

MIB = 2**20
MOST_RATIO, MOST_ADDED_S = 2.0, 0.005
CALM, WINDOWS_TO_KNOW, TRIES = 2.0, 3, 3
LINKS = 100  # links of fleet members in one measured period
FIRST, SECOND, LAST = -15, -10, -5  # priorities: the gateway, clients and engines, the attacker


class Window(NamedTuple):
    """The latencies and failures that regular clients measured in one period.

    p50     median latency in seconds
    p99     99th percentile of the latency, in seconds
    failed  number of failed requests
    """

    p50: float
    p99: float
    failed: int


class Result(NamedTuple):
    """What one attack cost regular clients and the gateway. Memory is in bytes.

    without         medians over the periods without the attack
    under           medians over the periods with the attack
    pairs           number of pairs of periods that counted
    longest_wait_s  99th percentile of the time that an event waits for the gateway's event loop, in
                    the worst period
    resident        growth of the gateway's resident memory
    sockets         growth of the kernel memory of the gateway's sockets
    sockstat        growth of all socket memory on the machine
    allowed         maximum of the sum of `resident` and `sockets`
    """

    name: str
    without: Window
    under: Window
    pairs: int
    longest_wait_s: float
    resident: int
    sockets: int
    sockstat: int
    allowed: int

    @property
    def has_passed(self) -> bool:
        fast = self.under.p99 <= max(MOST_RATIO * self.without.p99, self.without.p99 + MOST_ADDED_S)
        return (
            bool(self.pairs)
            and fast
            and not self.under.failed
            and self.resident + self.sockets <= self.allowed
        )

    def __str__(self) -> str:
        without, under = self.without, self.under
        ratio = under.p99 / max(without.p99, 1e-9)
        return (
            f"{self.name:40} p50 {without.p50 * 1e3:6.2f} {under.p50 * 1e3:7.2f}  "
            f"p99 {without.p99 * 1e3:6.2f} {under.p99 * 1e3:7.2f} ms x{ratio:5.2f}  "
            f"loop {self.longest_wait_s * 1e3:6.2f} ms  "
            f"RSS {self.resident / MIB:+6.1f} sockets {self.sockets / MIB:+6.1f} "
            f"(machine {self.sockstat / MIB:+6.1f}) MiB  failed {under.failed}  "
            f"{self.pairs} pairs  {'ok' if self.has_passed else 'MISSED'}"
        )


class Clients:
    """Regular clients, whose latencies are measured while the gateway is attacked.

    They send requests at a fixed rate over persistent connections.
    """

    def __init__(self, port: int, folder: Path, rate: float, window_ms: int) -> None:
        bodies = write_bodies(
            folder / "bodies", [chat_body("How does a water wheel work? ################", False)]
        )
        options = ["--port", port, "--bodies", bodies, "--mode", "open", "--rate", rate]
        options += ["--warmup-ms", 200, "--window-ms", window_ms]
        self._command = [*pinned(LOAD_CORE, SECOND), str(BIN / "load"), *map(str, options)]

    def window(self) -> Window:
        done = subprocess.run(
            self._command, capture_output=True, text=True, check=True, timeout=120
        )
        report: dict[str, Any] = json.loads(done.stdout)
        latency = report["latency_s"]
        return Window(latency["p50"], latency["p99"], sum(report["errors"].values()))


def pinned(core: int, priority: int) -> list[str]:
    """Return the beginning of a command line that runs a program on one CPU core.

    If this process runs as root, it also sets the priority (nice value).
    """
    nice = ["nice", "-n", str(priority)] if os.geteuid() == 0 else []
    return ["taskset", "-c", str(core), *nice]


def measure(attack: CostlyAttack, home: Attacked, clients: Clients, pairs: int) -> Result:
    calm_s = min(clients.window().p99 for _ in range(WINDOWS_TO_KNOW))
    counted: list[tuple[Window, Window]] = []
    longest_s, resident, sockets, machine = 0.0, 0, 0, 0
    for _ in range(pairs * TRIES):
        if len(counted) == pairs:
            break
        without = clients.window()
        before = home.cost.resident_bytes, home.cost.socket_bytes(), sockstat_bytes()
        home.cost.reset_peak()
        home.gaps()
        with attacking(attack.name, *home.ports, "--core", str(LOAD_CORE), "--nice", str(LAST)):
            time.sleep(0.3)
            under = clients.window()
            longest_s = max(longest_s, wait_s(home.gaps(), 0.99))
            resident = max(resident, home.cost.peak_resident_bytes - before[0])
            sockets = max(sockets, home.cost.socket_bytes() - before[1])
            machine = max(machine, sockstat_bytes() - before[2])
        time.sleep(0.3)
        if without.p99 <= CALM * calm_s:
            counted.append((without, under))
    without, under = (_median([pair[side] for pair in counted]) for side in (0, 1))
    allowed = MOST_GROWTH + attack.budget
    return Result(
        attack.name, without, under, len(counted), longest_s, resident, sockets, machine, allowed
    )


def _median(windows: list[Window]) -> Window:
    if not windows:
        return Window(0.0, 0.0, 0)
    p50, p99 = (median(window[number] for window in windows) for number in (0, 1))
    return Window(p50, p99, sum(window.failed for window in windows))


@contextmanager
def prepared(base: int) -> Iterator[tuple[Attacked, Path]]:
    """Run a new gateway for one attack during a `with` block.

    Attacks on one gateway would affect each other.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-attacks-")))
        hostile = stack.enter_context(canned_engine(str(LOAD_CORE)))
        prefix = pinned(GATEWAY_CORE, FIRST)
        gateway = attacked_gateway(folder, backend_urls(base), hostile, MODEL, prefix)
        yield stack.enter_context(gateway), folder


async def measure_agent(name: str, pairs: int, links: int) -> Result:
    """Measure how fast trusted clients connect to a KV agent during an attack on its port.

    Trusted clients know the fleet's secret key; the attacker does not.

    name   name of the attack
    pairs  number of periods with the attack, and as many without it
    links  number of connections per period
    """
    counted = []
    async with agent() as source:
        resident = source.cost.resident_bytes
        source.cost.reset_peak()
        for _ in range(pairs):
            without = await link_times(source, links)
            with attacking(name, source.port, source.port):
                under = await link_times(source, links)
            counted.append((_quantiles(without), _quantiles(under)))
        grown = source.cost.peak_resident_bytes - resident
    median_without, median_under = (_median([pair[arm] for pair in counted]) for arm in (0, 1))
    return Result(name, median_without, median_under, len(counted), 0.0, grown, 0, 0, MOST_GROWTH)


def _quantiles(times: list[float]) -> Window:
    ordered = sorted(times)
    return Window(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="run only the attacks whose name contains this text"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=3,
        help="number of measured pairs of periods: one without and one with the attack",
    )
    parser.add_argument(
        "--window-ms",
        type=int,
        default=1500,
        help="length of a measured period in milliseconds (default: %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=150.0,
        help="requests per second of the regular clients (default: %(default)s)",
    )
    options = parser.parse_args()
    build_tools()
    base, results = free_base(), []
    with backend(base):
        for attack in (attack for attack in CORPUS.values() if options.only in attack.name):
            with prepared(base) as (home, folder):
                clients = Clients(home.gateway.port, folder, options.rate, options.window_ms)
                results.append(measure(attack, home, clients, options.pairs))
            print(results[-1], flush=True)
    for name in (name for name in AGENT_CORPUS if options.only in name):
        results.append(asyncio.run(measure_agent(name, options.pairs, LINKS)))
        print(results[-1], flush=True)
    missed = [result.name for result in results if not result.has_passed]
    print(f"{len(results)} attacks, missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
