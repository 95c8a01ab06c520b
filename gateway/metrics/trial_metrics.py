"""The metrics of routing policies on trial.

The picks of a shadow policy are only recorded. In a canary trial, two policies each route a part of
the requests.
"""

from __future__ import annotations

from gateway.metrics.labels import POOL, RESULT, Row
from gateway.metrics.metric_types import Counter, Histogram, Label, MetricFamily, MetricRegistry

POLICY = Label("policy", 64)
DIRECTION = Label("direction", 4)
ARM = Label("arm", 2)
SLO_OUTCOME = Label("slo_outcome", 16)


class TrialMetrics:
    """The metrics of routing policies on trial.

    Shadow policies only compute what they would pick; canaries route a share of the requests.
    """

    def __init__(self, registry: MetricRegistry, ttft_buckets_s: tuple[float, ...]) -> None:
        shadow = registry.section(Row.CONFIGURATION, "trials/shadow.py")
        self.picks: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_picks_total",
            "Picks for which a shadow policy's own pick was compared, by result: agreed, "
            "differed, no_endpoint (the shadow policy found none), failed.",
            *(POOL, POLICY, RESULT),
        )
        self.ttft: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_ttft_seconds_total",
            "Sum of the predicted seconds by which first tokens would have come sooner, or later, "
            "with a shadow policy's picks.",
            *(POOL, POLICY, DIRECTION),
        )
        self.tokens: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_cached_tokens_total",
            "Sum of the prompt tokens by which a shadow policy's picks had more, or fewer, cached "
            "than the actual picks, by the prefix index.",
            *(POOL, POLICY, DIRECTION),
        )
        self.cost: MetricFamily[Counter] = shadow.counter(
            "penstock_shadow_cost_seconds_total",
            "CPU seconds spent on evaluating a shadow policy.",
            *(POOL, POLICY),
        )
        canary = registry.section(Row.CONFIGURATION, "trials/canary.py")
        self.requests: MetricFamily[Counter] = canary.counter(
            "penstock_canary_requests_total",
            "Requests of a pool with a canary, by arm (primary, canary) and by SLO outcome as in "
            "penstock_goodput_total, or unknown.",
            *(POOL, ARM, SLO_OUTCOME),
        )
        self.first_tokens: MetricFamily[Histogram] = canary.histogram(
            "penstock_canary_ttft_seconds",
            "Seconds from the last byte of a request to its first token, by arm of its pool's "
            "canary.",
            ttft_buckets_s,
            *(POOL, ARM),
            has_exemplars=True,
        )
