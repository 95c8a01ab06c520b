"""A canary: a second policy that serves a part of a pool's requests, and both sides' outcomes beside each other.

Lives here: which requests, and what is counted. Not here: how the canary's route is made (snapshot.py); it differs
from its pool's in the policy alone, so that from there on one line serves both.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

import msgspec
import xxhash

from gateway.config.choices import Canary
from gateway.exchange import Exchange
from gateway.metrics import Metrics
from gateway.sketch import Counts, quantile, rounded
from policies.model import Request

WHOLE = 1 << 64
MET = "met"


class Chosen(msgspec.Struct, frozen=True):
    """Whose requests the canary serves: these tenants', or sessions whose hash lies below `below`.

    The hash is the same at every gateway and after every restart: a session stays on its side. Every pool draws anew,
    and more percent keep those who were chosen before.
    """

    pool: str
    below: int
    tenants: frozenset[str]

    def takes(self, request: Request) -> bool:
        if self.tenants:
            return request.tenant in self.tenants
        whose = f"{self.pool}\0{request.session or request.id}"  # as sent: its bytes need not be UTF-8
        return xxhash.xxh3_64_intdigest(whose.encode("utf-8", "surrogatepass")) < self.below


def chosen(pool: str, spec: Canary) -> Chosen:
    """As configured."""
    return Chosen(pool, int(WHOLE * (spec.percent or 0.0) / 100), frozenset(spec.tenants))


class Side:
    """One policy of the two, and what became of the requests that it picked for."""

    __slots__ = ("_metrics", "name", "policy", "pool")

    def __init__(self, pool: str, name: str, policy: str) -> None:
        self.pool, self.name, self.policy = pool, name, policy
        self._metrics: Metrics | None = None

    def follow(self, metrics: Metrics | None) -> None:
        """From now on it counts here; None: nowhere."""
        self._metrics = metrics

    def count(self, x: Exchange) -> None:
        """One that is over."""
        if self._metrics is None:
            return
        trials = self._metrics.trials
        trials.requests.labels(self.pool, self.name, x.kept or "untold").value += 1.0
        if x.ttft_s is not None:
            trials.first_tokens.labels(self.pool, self.name).mark((x.ttft_s, monotonic(), x.id, ""))

    def told(self) -> dict[str, object]:
        """Its figures as plain values. None: nothing was served yet."""
        if self._metrics is None:
            return figures(self.name, self.policy, {}, {})
        trials = self._metrics.trials
        of_ours = (self.pool, self.name)
        kept = {labels[2]: int(each.value) for labels, each in trials.requests.children() if labels[:2] == of_ours}
        return figures(self.name, self.policy, kept, trials.first_tokens.labels(*of_ours).sketch)


class Sides:
    """The primary and the canary of one pool. Live while both are configured as they are."""

    __slots__ = ("canary", "pool", "primary", "share")

    def __init__(self, pool: str, spec: Canary, primary: str) -> None:
        self.pool = pool
        self.share = ", ".join(spec.tenants) if spec.tenants else f"{spec.percent:g} %"
        self.primary, self.canary = Side(pool, "primary", primary), Side(pool, "canary", spec.policy.name)

    def follow(self, metrics: Metrics) -> None:
        """From now on they count here."""
        self.primary.follow(metrics)
        self.canary.follow(metrics)

    def leave(self, metrics: Metrics) -> None:
        """Others take their place, or nobody: their series go, and requests of theirs that end later count nowhere."""
        self.primary.follow(None)
        self.canary.follow(None)
        metrics.trials.requests.forget("pool", self.pool)
        metrics.trials.first_tokens.forget("pool", self.pool)

    def told(self) -> dict[str, object]:
        return {"pool": self.pool, "share": self.share, "sides": [self.primary.told(), self.canary.told()]}


def figures(side: str, policy: str, outcomes: Mapping[str, int], ttft: Counts) -> dict[str, object]:
    """The results of one side: requests by SLO outcome, and times to first token as a sketch (sketch.py)."""
    judged = sum(outcomes.values()) - outcomes.get("untold", 0)
    return {
        "side": side,
        "policy": policy,
        "requests": sum(outcomes.values()),
        "goodput": round(outcomes.get(MET, 0) / judged, 4) if judged else None,
        "failed": outcomes.get("failed", 0),
        "shed": outcomes.get("shed", 0),
        "ttft_p50_s": rounded(quantile(ttft, 0.5)),
        "ttft_p99_s": rounded(quantile(ttft, 0.99)),
        "outcomes": outcomes,
        "ttft_sketch": {str(bucket): count for bucket, count in ttft.items()},
    }
