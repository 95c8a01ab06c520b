"""The metrics of routing policies on trial: shadow policies, and both arms of a canary."""

from __future__ import annotations

from gateway.metrics.labels import POOL, RESULT, Row
from gateway.metrics.metric_types import Counter, Histogram, Label, MetricFamily, MetricRegistry

POLICY = Label("policy", 64)
DIRECTION = Label("direction", 4)
ARM = Label("arm", 2)
SLO_OUTCOME = Label("slo_outcome", 16)


class TrialMetrics:
    """The metric families that report how routing policies on trial (shadows, canaries) perform."""

    def __init__(self, meters: MetricRegistry, ttft_buckets_s: tuple[float, ...]) -> None:
        shadow = meters.section(Row.CONFIGURATION, "trials/shadow.py")
        self.picks: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_picks_total",
            "Picks compared with a shadow policy's, by result: agreed, differed, no_endpoint (it "
            "found none), failed.",
            *(POOL, POLICY, RESULT),
        )
        self.ttft: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_ttft_seconds_total",
            "Predicted seconds by which first tokens would have come sooner, or later, if a shadow "
            "policy's picks had been used.",
            *(POOL, POLICY, DIRECTION),
        )
        self.tokens: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_cached_tokens_total",
            "Prompt tokens believed to be cached at a shadow policy's picks in excess of those at "
            "the actual picks (more, fewer).",
            *(POOL, POLICY, DIRECTION),
        )
        self.cost: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_cost_seconds_total",
            "CPU time spent on evaluating a shadow policy.",
            *(POOL, POLICY),
        )
        canary = meters.section(Row.CONFIGURATION, "trials/canary.py")
        self.requests: MetricFamily[Counter] = canary.counter(
            "penstock_canary_requests_total",
            "Requests of a pool with a canary by arm (primary, canary) and SLO outcome, as in "
            "penstock_goodput_total; unknown if it is not known.",
            *(POOL, ARM, SLO_OUTCOME),
        )
        self.first_tokens: MetricFamily[Histogram] = canary.histogram(
            "penstock_canary_ttft_seconds",
            "Time from the last byte of a request to its first token, by arm of its pool's canary.",
            ttft_buckets_s,
            *(POOL, ARM),
            has_exemplars=True,
        )
