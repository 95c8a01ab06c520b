"""A canary: a second routing policy that serves part of a pool's requests, for comparison.

This module selects the requests and counts their outcomes. reload/snapshot_plan.py builds the
canary's route, which differs from the pool's route only in its policy. Therefore the same code
serves both.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

import msgspec
import xxhash

from gateway.config.policy_sections import Canary
from gateway.metrics.catalogue import Metrics
from gateway.metrics.quantile_sketch import BucketCounts, quantile, round_seconds
from gateway.request_record import Exchange
from policies.routing_types import Request

HASH_RANGE = 1 << 64
MET = "met"


class CanarySampler(msgspec.Struct, frozen=True):
    """Selects the requests that the canary policy serves: by tenant, or by a hash of the session.

    A session is selected if its hash is less than `below`. The hash is the same in every gateway
    and after every restart, so a session keeps its policy. If the configured percentage rises, all
    sessions that were selected before stay selected. The hash includes the pool's name.
    """

    pool: str
    below: int
    tenants: frozenset[str]

    def selects(self, request: Request) -> bool:
        if self.tenants:
            return request.tenant in self.tenants
        key = f"{self.pool}\0{request.session or request.id}"
        # Session ids are taken as sent, so they need not be valid UTF-8.
        return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) < self.below


def create_sampler(pool: str, spec: Canary) -> CanarySampler:
    """Create the sampler that selects the requests which a pool's canary policy routes.

    `spec`, the canary's configuration, lists tenants or sets a percentage of the sessions.
    """
    return CanarySampler(
        pool, int(HASH_RANGE * (spec.percent or 0.0) / 100), frozenset(spec.tenants)
    )


class CanaryArm:
    """One of the two policies that a canary trial compares: it counts its requests by outcome."""

    __slots__ = ("_metrics", "name", "policy", "pool")

    def __init__(self, pool: str, name: str, policy: str) -> None:
        self.pool, self.name, self.policy = pool, name, policy
        self._metrics: Metrics | None = None

    def count_in(self, metrics: Metrics | None) -> None:
        """Count the outcomes of this policy's requests in `metrics` from now on; None stops it."""
        self._metrics = metrics

    def count(self, exchange: Exchange) -> None:
        """Count the outcome and the latency of a request that has ended."""
        if self._metrics is None:
            return
        trials = self._metrics.trial_metrics
        outcome = exchange.slo_outcome or "unknown"
        trials.requests.labels(self.pool, self.name, outcome).value += 1.0
        if exchange.ttft_s is not None:
            ttft = trials.first_tokens.labels(self.pool, self.name)
            ttft.observe_request((exchange.ttft_s, monotonic(), exchange.id, ""))

    def as_json(self) -> dict[str, object]:
        """Return this policy's results as JSON-compatible values; None before its first request."""
        if self._metrics is None:
            return summarize_arm(self.name, self.policy, {}, {})
        trials = self._metrics.trial_metrics
        own_labels = (self.pool, self.name)
        outcomes = {
            labels[2]: int(counter.value)
            for labels, counter in trials.requests.children()
            if labels[:2] == own_labels
        }
        sketch = trials.first_tokens.labels(*own_labels).sketch
        return summarize_arm(self.name, self.policy, outcomes, sketch)


class CanaryArms:
    """The two routing policies of a pool's canary trial: the pool's own (primary) and the canary.

    Their results are kept while their configuration is unchanged.
    """

    __slots__ = ("canary", "pool", "primary", "share")

    def __init__(self, pool: str, spec: Canary, primary: str) -> None:
        self.pool = pool
        self.share = ", ".join(spec.tenants) if spec.tenants else f"{spec.percent:g} %"
        self.primary = CanaryArm(pool, "primary", primary)
        self.canary = CanaryArm(pool, "canary", spec.policy.name)

    def count_in(self, metrics: Metrics) -> None:
        """From now on, count in `metrics` the outcomes of the primary and the canary policy."""
        self.primary.count_in(metrics)
        self.canary.count_in(metrics)

    def remove_series(self, metrics: Metrics) -> None:
        """Remove the metric series of a trial that has ended, and stop counting its outcomes."""
        self.primary.count_in(None)
        self.canary.count_in(None)
        metrics.trial_metrics.requests.remove_children("pool", self.pool)
        metrics.trial_metrics.first_tokens.remove_children("pool", self.pool)

    def as_json(self) -> dict[str, object]:
        """Return the results of both policies of a canary trial as plain values."""
        arms = [self.primary.as_json(), self.canary.as_json()]
        return {"pool": self.pool, "share": self.share, "arms": arms}


def summarize_arm(
    arm: str, policy: str, outcomes: Mapping[str, int], ttft: BucketCounts
) -> dict[str, object]:
    """Return a summary of one policy: its requests by outcome, and times to first token.

    The outcomes say whether latency targets (SLO) were met. `ttft` has the counts of a quantile
    sketch.
    """
    judged = sum(outcomes.values()) - outcomes.get("unknown", 0)
    return {
        "arm": arm,
        "policy": policy,
        "requests": sum(outcomes.values()),
        "goodput": round(outcomes.get(MET, 0) / judged, 4) if judged else None,
        "failed": outcomes.get("failed", 0),
        "shed": outcomes.get("shed", 0),
        "ttft_p50_s": round_seconds(quantile(ttft, 0.5)),
        "ttft_p99_s": round_seconds(quantile(ttft, 0.99)),
        "outcomes": outcomes,
        "ttft_sketch": {str(bucket): count for bucket, count in ttft.items()},
    }
