"""The state that automatic policy selection (`policy: auto`) keeps for one pool."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.config import PolicySpec
from policies.auto.replay_messages import PolicyMember, PoolEstimate
from policies.auto.switch_decision import PolicyDecider, PolicyDecision


class SwitchRecord(msgspec.Struct, frozen=True):
    """One automatic change of a pool's routing policy after a comparison. `at_s` is Unix time."""

    at_s: float
    version: int
    before: str
    after: str
    reason: str


class PoolState:
    """The state of one pool whose routing policy is selected automatically.

    Replays compare its policies at intervals. Times are Unix seconds unless noted.

    policy            name of the current policy
    due_at            monotonic time of the next comparison
    counts_from_s     comparisons ignore requests that arrived before this time
    in_force_since_s  time at which the current policy began to serve the pool
    held              why the policy stays until an operator permits changes; empty if changes are
                      permitted
    trouble           why policies cannot be compared now; empty if they can
    failures          number of comparisons in a row that gave no estimate
    failure           cause of the newest failed comparison; empty if the last one gave an estimate
    """

    def __init__(self, policy: PolicyMember, due_at: float, now_s: float) -> None:
        self.policy = policy
        self.due_at = due_at
        self.counts_from_s = 0.0
        self.in_force_since_s = now_s
        self.decider = PolicyDecider()
        self.held = self.trouble = self.failure = ""
        self.failures = 0
        self.compared_at_s: float | None = None
        self.estimate: PoolEstimate | None = None
        self.decision: PolicyDecision | None = None
        self.switches: list[SwitchRecord] = []

    def on_policy_changed(self, policy: PolicyMember, now_s: float) -> None:
        self.policy, self.in_force_since_s = policy, now_s
        self.decider.forget()

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy.label,
            "in_force_since": self.in_force_since_s,
            "held": self.held,
            "trouble": self.trouble,
            "failure": self.failure,
            "compared_at": self.compared_at_s,
            "decision": msgspec.to_builtins(self.decision),
            "estimate": msgspec.to_builtins(self.estimate),
            "switches": msgspec.to_builtins(self.switches),
        }


def member_of(spec: PolicySpec) -> PolicyMember:
    return PolicyMember(spec.name, dict(spec.params))
