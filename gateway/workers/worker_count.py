"""Computes the number of workers for `workers: auto`: one per core that the gateway may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

from gateway.config.value_types import AUTO, MAX_WORKERS

_CGROUPS = Path("/sys/fs/cgroup")


def resolve_worker_count(workers: int | Literal["auto"]) -> int:
    """Return the number of workers for a configured value: a number, or "auto"."""
    if workers != AUTO:
        return workers
    return min(cores_within_quotas(len(os.sched_getaffinity(0)), _cpu_quotas()), MAX_WORKERS)


def cores_within_quotas(cores: int, quotas: Iterable[str]) -> int:
    """Return how many whole cores the CPU quotas permit, at least 1.

    Each quota is the content of a cgroup's `cpu.max` (Linux, cgroup v2): microseconds of CPU time
    or `max`, and the period in microseconds. A fraction of a core is ignored, because the kernel
    would throttle a worker on it in the middle of requests.
    """
    for quota in quotas:
        limit, _, period = quota.strip().partition(" ")
        if limit.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(limit) // int(period))
    return max(1, cores)


def _cpu_quotas() -> list[str]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = PurePosixPath(own)
    quotas = []
    for folder in (group, *group.parents):
        try:
            quotas.append((_CGROUPS / folder / "cpu.max").read_text())
        except OSError:  # the topmost group has no such file
            continue
    return quotas
