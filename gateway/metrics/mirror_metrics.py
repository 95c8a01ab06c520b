"""The metrics of mirrors, which compare answers of candidate engines with those of live ones."""

from __future__ import annotations

from gateway.metrics.labels import POOL, RESULT, Row
from gateway.metrics.metric_types import Counter, Gauge, Label, Merge, MetricFamily, MetricRegistry

MEASURE = Label("measure", 8)


class MirrorMetrics:
    """The metrics of mirrors, which compare the answers of candidate engines with live ones."""

    def __init__(self, registry: MetricRegistry) -> None:
        mirror = registry.section(Row.CONFIGURATION, "trials/mirror.py")
        self.requests: MetricFamily[Counter] = mirror.counter(
            "penstock_mirror_requests_total",
            "Sampled requests of a pool with a mirror, by result: compared, busy (too many at "
            "once), budget (token budget used up), loaded (no idle capacity), down (no candidate "
            "engine), unsuitable, unanswered (the client's engine failed), failed (the client's "
            "engine did not answer the copy).",
            *(POOL, RESULT),
        )
        self.tokens: MetricFamily[Counter] = mirror.counter(
            "penstock_mirror_tokens_total",
            "Tokens of prompts and answers that the engines processed for a pool's mirror.",
            POOL,
        )
        self.loss: MetricFamily[Gauge] = mirror.gauge(
            "penstock_mirror_loss",
            "Difference between the candidate's answers and those of the client's engine, minus "
            "the difference between two answers of the client's engine. Mean of the last block of "
            "compared requests, by measure; positive if the candidate is worse.",
            *(POOL, MEASURE),
            merge=Merge.MAX,
        )
        self.worse: MetricFamily[Gauge] = mirror.gauge(
            "penstock_mirror_worse",
            "1 if, in the last block of compared requests, the candidate was worse than chance "
            "explains, else 0.",
            POOL,
            merge=Merge.MAX,
        )

    def remove_pool(self, pool: str) -> None:
        """Remove a pool's series of these metrics, because its mirror has ended or restarts."""
        for family in (self.requests, self.tokens, self.loss, self.worse):
            family.remove_children("pool", pool)
