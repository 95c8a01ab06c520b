"""Messages between a gateway and its replay process, which compares routing policies by simulation.

The gateway sends what to compare, and the process returns estimates of goodput. The messages are
JSON on the process's pipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class PolicyMember(msgspec.Struct, frozen=True):
    """One of the routing policies to compare: its name and its parameters."""

    policy: str
    parameters: Mapping[str, Any] = {}

    @property
    def label(self) -> str:
        """Return the policy's name for messages, followed by its parameters if it has any."""
        if not self.parameters:
            return self.policy
        texts = (f"{key}={value}" for key, value in sorted(self.parameters.items()))
        return f"{self.policy}({','.join(texts)})"


class PoolJob(msgspec.Struct, frozen=True):
    """A pool whose routing policies are to be compared by a replay of its recent requests.

    Times are Unix times in seconds.

    endpoints         names of the pool's endpoints, in the order of the configuration
    members           the policies; the current one is first
    window_s          seconds of recent requests to replay
    counts_from_s     requests that arrived before this time are replayed but not counted, because
                      the fleet had a fault
    in_force_since_s  time since which the current policy has served all requests
    """

    pool: str
    endpoints: tuple[str, ...]
    members: tuple[PolicyMember, ...]
    window_s: float
    counts_from_s: float
    in_force_since_s: float


class ReplayJob(msgspec.Struct, frozen=True):
    """The job of a replay process: for each pool that is due, compare its routing policies.

    config     the gateway's configuration as plain values, with durations in seconds
    log        path of the access log
    now_s      Unix time in seconds
    cpu_share  fraction of one core that the process may use
    """

    config: Mapping[str, Any]
    log: str
    now_s: float
    cpu_share: float
    pools: tuple[PoolJob, ...]


class MemberEstimate(msgspec.Struct, frozen=True):
    """The estimated goodput of one routing policy on a pool's recent requests.

    member   the policy's label
    goodput  share of requests within the latency budgets of their service class, weighted by class
    gain     this policy's goodput minus the current policy's, on the same arrivals
    error    half of the width of the 95 % confidence interval of the gain
    gains    the gain in each of several equally large blocks of consecutive requests
    """

    member: str
    goodput: float
    gain: float = 0.0
    error: float = 0.0
    gains: tuple[float, ...] = ()


class PoolEstimate(msgspec.Struct, frozen=True):
    """The estimated goodput of all compared routing policies for one pool.

    incumbent  label of the current policy
    requests   number of requests that were compared
    span_s     seconds in which these requests arrived
    doubt      why the estimate cannot be trusted: how the replay of the current policy differs from
               the log; empty: it can be trusted
    members    the estimates by policy; the current policy is first
    until_s    Unix time before which the compared requests arrived
    """

    pool: str
    incumbent: str
    requests: int
    span_s: float
    doubt: str
    members: tuple[MemberEstimate, ...]
    until_s: float = 0.0


class ReplayAnswer(msgspec.Struct, frozen=True):
    """The result of a replay process: estimates by pool, and error texts of pools that failed.

    cpu_s  CPU time in seconds that the process has used
    """

    estimates: tuple[PoolEstimate, ...]
    failed: Mapping[str, str]
    cpu_s: float
