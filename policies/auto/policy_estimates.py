"""Estimates of the goodput that each routing policy would have had on a pool's recent requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class PolicyMember(msgspec.Struct, frozen=True):
    """One of the routing policies that are compared: its name and its parameters."""

    policy: str
    parameters: Mapping[str, Any] = {}

    @property
    def label(self) -> str:
        """Return the policy's name, with its parameters if there are any."""
        if not self.parameters:
            return self.policy
        texts = (f"{key}={value}" for key, value in sorted(self.parameters.items()))
        return f"{self.policy}({','.join(texts)})"


class MemberEstimate(msgspec.Struct, frozen=True):
    """The estimated goodput of one routing policy on a pool's recent requests.

    member   the policy's label
    goodput  share of requests within the budgets of their service class, weighted by the class
    gain     goodput minus that of the policy in force, on the same arrivals
    error    half of the width of the 95 % interval of the gain
    gains    the gain in each of several blocks of consecutive requests of equal size
    """

    member: str
    goodput: float
    gain: float = 0.0
    error: float = 0.0
    gains: tuple[float, ...] = ()


class PoolEstimate(msgspec.Struct, frozen=True):
    """The estimated goodput of all compared routing policies for one pool.

    incumbent  label of the policy in force
    requests   number of requests that were compared
    span_s     seconds in which these requests arrived
    doubt      why the estimate cannot be trusted: how the replay of the policy in force differs
               from the log; empty if it does not
    members    the policies, with the one in force first
    until_s    Unix time before which the compared requests arrived
    """

    pool: str
    incumbent: str
    requests: int
    span_s: float
    doubt: str
    members: tuple[MemberEstimate, ...]
    until_s: float = 0.0
