"""The routing rule LMetric: the least product of new prefill tokens and batch size."""

from __future__ import annotations

from collections.abc import Sequence

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.policy_types import Policy, WeightedScorer
from policies.published.rule_inputs import cached_tokens
from policies.routing_types import Candidate, RoutingQuery


class LMetric(PolicyParams, frozen=True):
    """A policy that picks the least product of tokens to prefill and number of requests.

    The tokens are those before this request's first token: the queue plus the uncached tokens of
    this prompt. The number of requests includes this one, as in AIBrix's port (l_metric_local.go).
    There are no parameters, because the product needs no weights. Source: LMetric (OSDI'26, arXiv
    2603.15202).
    """

    def build(self) -> Policy:
        return Policy(
            name="lmetric",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(product),),
            picker=pickers.best,
            reads_prefix=True,
        )


def product(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
    """Return each candidate's score by the rule LMetric: -(Q + u) * (N + 1).

    Q is the number of queued prefill tokens, u the number of uncached tokens of this prompt, and N
    the number of requests in flight.
    """
    prompt = query.request.prompt_tokens
    return [
        -float((load.prefill_tokens + prompt - cached) * (load.in_flight + 1))
        for load, cached in zip(
            (candidate.load for candidate in candidates),
            cached_tokens(query, candidates),
            strict=True,
        )
    ]
