"""Decides from simulated goodput whether a pool switches its policy: by how much it must gain.

Goodput is the share of requests that are served within their latency budgets. The policy changes if
the gain is larger than its statistical error. Gains of several estimates are pooled
(pooled_gains.py); a single estimate suffices only for a large gain. There are at most three changes
per hour. `now` is any clock in seconds that does not go back.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

import msgspec

from policies.auto.pooled_gains import PooledGains
from policies.auto.replay_messages import MemberEstimate, PoolEstimate

LEAST_GAIN = 0.01
"""Minimum gain in goodput (0 to 1) that justifies a change of policy.

The gain must exceed it by more than the estimate's error. A change has a cost: sessions move away
from the endpoints that cache their prompts.
"""

LEAST_REQUESTS = 200
MOST_SWITCHES, HOUR_S = 3, 3600.0
SURE = 2.0
"""Factor by which a gain must exceed the required gain to change the policy immediately.

A smaller gain changes the policy only after a second estimate has confirmed it.
"""

RETURN = 2.0
"""Factor by which a policy's gain must exceed the required one if the policy was replaced in the
last hour.

It prevents a pool from switching back and forth between two policies of similar value.
"""


class Action(StrEnum):
    """What the gateway does after a simulated comparison of routing policies.

    It keeps the current policy, switches to another one, or advises the operator to switch.
    """

    KEEP = "keep"
    SWITCH = "switch"
    ADVISE = "advise"


class PolicyDecision(msgspec.Struct, frozen=True):
    """A decision about a pool's routing policy, with its reason in one sentence.

    member  label of the best of the other policies; "": there is none
    gain    estimated gain in goodput by that policy, 0 to 1
    error   half of the width of the 95 % confidence interval of the gain
    """

    action: Action
    reason: str
    member: str = ""
    gain: float = 0.0
    error: float = 0.0


class PolicyDecider:
    """Decides when one pool should switch to another routing policy.

    It decides after each simulated comparison of policies. At most three switches are made per
    hour. All comparisons since the last switch are remembered.
    """

    def __init__(self) -> None:
        self._switched_at: deque[float] = deque(maxlen=MOST_SWITCHES)
        self._left_at: dict[str, float] = {}
        self._evidence = PooledGains()

    def decide(self, now: float, estimate: PoolEstimate, *, may_switch: bool) -> PolicyDecision:
        """Return the decision about a pool's routing policy that follows from one more estimate.

        If `may_switch` is false, a switch is only advised.
        """
        if estimate.requests < LEAST_REQUESTS:
            return _keep(
                f"only {estimate.requests} requests were compared, of {LEAST_REQUESTS} needed"
            )
        if estimate.doubt:
            return _keep(f"the replay does not reproduce the log: {estimate.doubt}")
        self._evidence.add(now, estimate)
        best = max(
            self._evidence.pooled(now),
            key=lambda member: member.gain - member.error,
            default=None,
        )
        if best is None:
            return _keep("the portfolio has no other policy")
        required = self._required_gain(now, best)
        if best.gain <= required:
            return _keep(
                f"{best.member} would serve {_points(best.gain)} more, "
                f"which does not exceed the {_points(required)} that a change needs",
                best,
            )
        evidence = (
            f"{best.member} would have served {_points(best.gain)} more "
            f"(error {_points(best.error)}) of {self._evidence.requests} requests"
        )
        if self._evidence.comparisons < 2 and best.gain < SURE * required:
            return _keep(f"{evidence}; the next estimate must confirm this", best)
        if not may_switch:
            return PolicyDecision(Action.ADVISE, evidence, best.member, best.gain, best.error)
        if self._recent_switches(now) >= MOST_SWITCHES:
            return _keep(f"{evidence}, but {MOST_SWITCHES} changes were made within an hour", best)
        return PolicyDecision(Action.SWITCH, evidence, best.member, best.gain, best.error)

    @property
    def counted_until_s(self) -> float:
        """Return the Unix time before which all requests have been compared; 0: none have been."""
        return self._evidence.until_s

    def on_switched(self, now: float, left: str) -> None:
        """Record that the pool now uses another routing policy, to limit switches and start over.

        `left` is the label of the old policy.
        """
        self._switched_at.append(now)
        self._left_at = {
            member: left_at for member, left_at in self._left_at.items() if now - left_at < HOUR_S
        }
        self._left_at[left] = now
        self._evidence.forget()

    def forget(self) -> None:
        """Discard all earlier estimates, because the configuration or the fleet has changed."""
        self._evidence.forget()

    def _required_gain(self, now: float, best: MemberEstimate) -> float:
        left_at = self._left_at.get(best.member)
        is_return = left_at is not None and now - left_at < HOUR_S
        return (best.error + LEAST_GAIN) * (RETURN if is_return else 1.0)

    def _recent_switches(self, now: float) -> int:
        return sum(now - switched_at < HOUR_S for switched_at in self._switched_at)


def _keep(reason: str, best: MemberEstimate | None = None) -> PolicyDecision:
    if best is None:
        return PolicyDecision(Action.KEEP, reason)
    return PolicyDecision(Action.KEEP, reason, best.member, best.gain, best.error)


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
