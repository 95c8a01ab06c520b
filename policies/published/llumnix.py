"""The routing rule of Llumnix: least prefill work to the first token, then least decode work."""

from __future__ import annotations

from collections.abc import Sequence

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.endpoint_load import EndpointLoad
from policies.policy_types import Policy, WeightedScorer
from policies.published.rule_inputs import cached_tokens
from policies.routing_types import Candidate, RoutingQuery


class Llumnix(PolicyParams, frozen=True):
    """A policy that picks the fewest queued and new uncached tokens, then the least decode context.

    It has no parameters. Source: the cache-aware order of Llumnix (OSDI'24; llumnix-project 2026).
    There, a step model extrapolates the queue between the engine's reports. Here, the predicted end
    of the queue is converted back to tokens. Its roles and migrations move running requests between
    engines, which a gateway cannot do.
    """

    def build(self) -> Policy:
        return Policy(
            name="llumnix",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(prefill_ahead),),
            picker=pickers.best_with_tie_breakers(_generation),
            reads_prefix=True,
            reads_forecast=True,
        )


def prefill_ahead(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
    """Return each candidate's score: minus its prompt tokens to compute before the first token.

    These are Q + u: the tokens of queued prompts, and the uncached tokens of this prompt.
    """
    now, prompt, scores = query.now, query.request.prompt_tokens, []
    for candidate, cached in zip(candidates, cached_tokens(query, candidates), strict=True):
        load = candidate.load
        queue: float = load.prefill_tokens
        if queue and load.prefill_s_per_token > 0.0:
            queue = min(queue, max(0.0, load.prefill_done_at - now) / load.prefill_s_per_token)
        scores.append(cached - prompt - queue)
    return scores


def _generation(load: EndpointLoad) -> float:
    return load.decode_tokens + load.expected_tokens
