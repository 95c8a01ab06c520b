"""The messages between a gateway and its replay process, as JSON on the process's pipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from policies.auto.policy_estimates import PolicyMember, PoolEstimate


class PoolJob(msgspec.Struct, frozen=True):
    """A pool whose routing policies are to be compared by a replay of its requests.

    Times are Unix times in seconds.

    endpoints         names of the pool's endpoints, in the order of the configuration
    members           the policies, with the one in force first
    window_s          seconds of recent requests to replay
    counts_from_s     requests that arrived before this time are replayed but not counted, because
                      the fleet had a fault
    in_force_since_s  time since which the policy in force has served all requests
    """

    pool: str
    endpoints: tuple[str, ...]
    members: tuple[PolicyMember, ...]
    window_s: float
    counts_from_s: float
    in_force_since_s: float


class ReplayJob(msgspec.Struct, frozen=True):
    """The job of a replay process: a comparison of policies for all pools that are due.

    config  the gateway's configuration as plain values, with durations in seconds
    log     path of the access log
    now_s   Unix time in seconds
    cpu_share  share of one core that the process may use
    """

    config: Mapping[str, Any]
    log: str
    now_s: float
    cpu_share: float
    pools: tuple[PoolJob, ...]


class ReplayAnswer(msgspec.Struct, frozen=True):
    """The result of a replay process: estimates by pool, and reasons for pools that failed.

    cpu_s  CPU time in seconds that the process has used
    """

    estimates: tuple[PoolEstimate, ...]
    failed: Mapping[str, str]
    cpu_s: float
