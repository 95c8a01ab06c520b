"""The metrics of mirrors, which compare live answers with those of candidate engines."""

from __future__ import annotations

from gateway.metrics.labels import POOL, RESULT, Row
from gateway.metrics.metric_types import Counter, Gauge, Label, Merge, MetricFamily, MetricRegistry

MEASURE = Label("measure", 8)


class MirrorMetrics:
    """The metric families of mirrors: requests, tokens, and the last verdict."""

    def __init__(self, meters: MetricRegistry) -> None:
        mirror = meters.section(Row.CONFIGURATION, "trials/mirror.py")
        self.requests: MetricFamily[Counter] = mirror.counter(
            "penstock_mirror_requests_total",
            "Sampled requests of a pool with a mirror, by result: compared, busy (too many at "
            "once), budget, loaded (no idle capacity), down (no candidate), unsuitable, unanswered "
            "(by the client's engine), failed (the base did not answer again).",
            *(POOL, RESULT),
        )
        self.tokens: MetricFamily[Counter] = mirror.counter(
            "penstock_mirror_tokens_total",
            "Tokens of prompts and answers that a pool's mirror has spent at engines.",
            POOL,
        )
        self.loss: MetricFamily[Gauge] = mirror.gauge(
            "penstock_mirror_loss",
            "By how much the candidate differs from the base more than the base from itself, in "
            "the last block of compared requests, by measure.",
            *(POOL, MEASURE),
            merge=Merge.MAX,
        )
        self.worse: MetricFamily[Gauge] = mirror.gauge(
            "penstock_mirror_worse",
            "1 if the candidate was worse than chance explains in the last block of compared "
            "requests, else 0.",
            POOL,
            merge=Merge.MAX,
        )

    def remove_pool(self, pool: str) -> None:
        """Remove the metric series of a mirror that has ended or begins again."""
        for family in (self.requests, self.tokens, self.loss, self.worse):
            family.remove_children("pool", pool)
