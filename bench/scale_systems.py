"""The gateways that `make bench-scale` measures, and what its parts have in common."""

from __future__ import annotations

import os
import time
from pathlib import Path

from compared_systems import (
    COMPILED,
    ROOT,
    System,
    cpu_s,
    nginx_command,
    penstock_command,
)

NGINX = "nginx"
BACKGROUND_S = 8.0


def system_of(
    policy: str, urls: list[str], port: int, home: Path = COMPILED, workers: int = 1
) -> System:
    """Return the benchmarked system: Penstock, or nginx if that is the policy's name.

    policy   routing policy
    urls     URLs of the engines
    port     port of the API
    home     folder of the gateway's modules: COMPILED, or ROOT for the sources
    workers  number of processes; nginx has one
    """
    if policy == NGINX:
        return System(NGINX, "round_robin", port, lambda work, at: nginx_command(urls, work, at))
    write = penstock_command(policy, urls)

    def command(work: Path, at: int) -> list[str]:
        line = write(work, at)
        with Path(line[-1]).open("a") as config:
            config.write("limits: {connections: 20000, connections_per_address: 20000}\n")
            config.write(f"workers: {workers}\n")
        return line

    return System("penstock", policy, port, command, home)


def idle_share(pids: list[int], seconds: float = BACKGROUND_S) -> float:
    """Return the CPU time that these processes use without requests, as a share of one core."""
    began, at = cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pids) - began) / (time.monotonic() - at)


def verdict(value: float, limit: float) -> str:
    """Return whether a measured value meets its goal, as the end of a printed line."""
    return f"goal {limit:g}: {'met' if value <= limit else 'MISSED'}"


def describe_conditions(home: Path) -> str:
    """Return a line that says which build is measured, and how busy the machine is."""
    build = "compiled" if home == COMPILED else "from sources"
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return (
        f"penstock {build} ({home.relative_to(ROOT.parent)}), {os.cpu_count()} cores, "
        f"load average {loads}, nice {nice}"
    )
