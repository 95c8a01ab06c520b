"""Two admission rules that refuse requests by the saturation of a pool, as llm-d computes it.

Saturation is the mean of queue length and KV use, relative to their limits. One rule refuses from a
threshold on, the other with a probability that rises with saturation.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.admission.admission_policy import (
    Admission,
    AdmissionParams,
    Shed,
    Verdict,
    WaitQueueView,
)
from policies.admission.cap_admission import CapAdmission
from policies.admission.refusals import occupancy_text, shed_no_capacity
from policies.param_types import Exponent, NonNegative, Positive
from policies.published.rule_inputs import is_fresh, kv_used, queued_requests
from policies.routing_types import Candidate, RoutingQuery

BEYOND = 1e3
"""Upper limit of the saturation, so that its powers stay finite."""


class GieSaturation(AdmissionParams, frozen=True):
    """An admission policy that refuses requests of negative priority while the pool is saturated.

    Other requests are admitted up to the concurrency caps. Source: the saturation detector and
    legacy admission of the Gateway API Inference Extension (llm-d), with its thresholds. There,
    metrics are milliseconds old, and outdated ones count as saturated. Here, the larger of scraped
    metrics and reserved requests counts.

    queue_depth  number of waiting requests from which an engine counts as saturated
    kv_usage     share of KV in use from which an engine counts as saturated
    fresh_s      maximum age of scraped metrics in seconds
    """

    queue_depth: Positive = 5.0
    kv_usage: Positive = 0.8
    fresh_s: NonNegative = 5.0

    def build(self) -> Admission:
        return SheddingBySaturation(
            "gie_saturation", self.queue_depth, self.kv_usage, self.fresh_s, None
        )


class Probabilistic(AdmissionParams, frozen=True):
    """An admission policy that refuses requests with a negative priority at random.

    The probability of a refusal is k * saturation ** power. Other requests are admitted up to the
    concurrency caps. Source: llm-d's probabilistic admitter, whose parameters were found by search
    in the BLIS simulator (llm-d blog, 2026). With them, 1 request in 100 is refused at a saturation
    of 0.13, and all at 0.32.

    power        exponent of the saturation
    k            factor of the probability
    queue_depth  as for gie_saturation
    kv_usage     as for gie_saturation
    fresh_s      as for gie_saturation
    """

    power: Exponent = 5.0
    k: NonNegative = 300.0
    queue_depth: Positive = 5.0
    kv_usage: Positive = 0.8
    fresh_s: NonNegative = 5.0

    def build(self) -> Admission:
        ramp = (self.power, self.k)
        return SheddingBySaturation(
            "probabilistic", self.queue_depth, self.kv_usage, self.fresh_s, ramp
        )


def saturation(
    candidates: Sequence[Candidate], now: float, queue_depth: float, kv_usage: float, fresh_s: float
) -> float:
    """Return a pool's saturation: the mean of max(queue / queue_depth, KV use / kv_usage).

    The mean is over all candidates. Returns 1 if no candidate is available.

    queue_depth  number of waiting requests from which an engine counts as saturated
    kv_usage     share of KV in use from which an engine counts as saturated
    fresh_s      maximum age of scraped metrics in seconds
    """
    oldest, total, count = now - fresh_s, 0.0, 0
    for candidate in candidates:
        load = candidate.load
        if load.is_available:
            waiting = (
                load.waiting
                if load.waiting is not None and is_fresh(load, oldest)
                else queued_requests(load, oldest)
            )
            total += max(waiting / queue_depth, kv_used(load, oldest) / kv_usage)
            count += 1
    return total / count if count else 1.0


class SheddingBySaturation(CapAdmission):
    """An admission policy that first refuses by saturation, then applies the concurrency caps.

    `ramp` is (power, k) of the probability; None: a threshold at a saturation of 1.
    """

    __slots__ = ("_fresh_s", "_kv_usage", "_queue_depth", "_ramp")

    def __init__(
        self,
        name: str,
        queue_depth: float,
        kv_usage: float,
        fresh_s: float,
        ramp: tuple[float, float] | None,
    ) -> None:
        super().__init__()
        self.name, self.is_calm = name, False
        self._queue_depth, self._kv_usage, self._fresh_s = queue_depth, kv_usage, fresh_s
        self._ramp = ramp

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        if not queue.is_new_arrival or query.request.priority >= 0:
            return super().decide(query, candidates, queue)
        if queue.capacity <= 0:
            return shed_no_capacity()
        saturation_ = saturation(
            candidates, query.now, self._queue_depth, self._kv_usage, self._fresh_s
        )
        if self._sheds(query, saturation_):
            expected_s = queue.drain_rate.seconds_for(1, query.now)
            pool = f"The pool is saturated at {saturation_:.2f}"
            text = f"{pool}, and requests of priority {query.request.priority} are refused"
            return Shed("saturated", expected_s, f"{text}. {occupancy_text(queue, expected_s)}.")
        return super().decide(query, candidates, queue)

    def _sheds(self, query: RoutingQuery, saturation_: float) -> bool:
        if self._ramp is None:
            return saturation_ >= 1.0
        power, k = self._ramp
        return query.rng.random() < k * float(min(saturation_, BEYOND) ** power)
