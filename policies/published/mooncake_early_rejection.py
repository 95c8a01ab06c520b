"""Mooncake's early rejection: refuse requests whose predicted latency is too long, at arrival."""

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
from policies.latency.expected_latency import tpot_s
from policies.param_types import NonNegative
from policies.pricing.admission_cost import estimate_cost
from policies.routing_types import Candidate, RoutingQuery


class EarlyRejection(AdmissionParams, frozen=True):
    """An admission policy that refuses a new request whose predicted latencies are too long.

    The latencies are the time to first token (TTFT) and the time per token (TPOT) at the best
    endpoint. Other requests are admitted up to the concurrency caps. Source: Mooncake (FAST'25,
    arXiv 2407.00079), which decides at arrival, for prefill and for decode, before any work is
    spent. With the published margin of 1, it admits requests up to the limit itself.

    margin  share of the TTFT and TPOT budgets that the prediction may use
    """

    margin: NonNegative = 1.0

    def build(self) -> Admission:
        return EarlyRejector(self.margin)


class EarlyRejector(CapAdmission):
    """An admission policy that refuses a request whose predicted latencies exceed its budgets.

    Other requests enter up to the concurrency caps. EarlyRejection describes the rule.
    """

    __slots__ = ("_margin",)

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.name, self.is_calm, self.reads_forecast = "early_rejection", False, True
        self._margin = margin

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        if not queue.is_new_arrival:
            return super().decide(query, candidates, queue)
        if queue.capacity <= 0:
            return shed_no_capacity()
        request, slo = query.request, query.request.slo
        first_s, first_most = estimate_cost(query, candidates).ttft_s, self._margin * slo.ttft_s
        if first_s > first_most:
            over = first_s - first_most
            return Shed(
                "ttft",
                over,
                f"{_late_text('first token', first_s, first_most)} s. {occupancy_text(queue, over)}.",  # noqa: E501
            )
        loads = [candidate.load for candidate in candidates if candidate.load.is_available]
        step_s = min((tpot_s(load, request.prompt_tokens) for load in loads), default=0.0)
        step_most = self._margin * slo.tpot_s
        if step_s > step_most:
            expected_s = queue.drain_rate.seconds_for(1, query.now)
            return Shed(
                "tpot",
                expected_s,
                f"{_late_text('token', step_s, step_most)} s each. {occupancy_text(queue, expected_s)}.",  # noqa: E501
            )
        return super().decide(query, candidates, queue)


def _late_text(unit: str, predicted_s: float, most_s: float) -> str:
    return f"The {unit} is expected after {predicted_s:.3g} s, and may take {most_s:.3g}"
