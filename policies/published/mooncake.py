"""The routing rule of Mooncake's Conductor: the least expected time to the first token."""

from __future__ import annotations

from collections.abc import Sequence

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.policy_types import Policy, WeightedScorer
from policies.published.rule_inputs import cached_tokens, ttfts
from policies.routing_types import Candidate, RoutingQuery


class Mooncake(PolicyParams, frozen=True):
    """A policy that picks the least expected time to the first token: queue plus uncached prefill.

    It has no parameters. Source: Mooncake (FAST'25), algorithm 1, with a roofline model of the
    hardware instead of its offline polynomial. Its transfer of prefixes between engines is left
    out, because engines here fetch KV only from a prefill to a decode engine. Its rejections are
    the admission policy `early_rejection`.
    """

    def build(self) -> Policy:
        return Policy(
            name="mooncake",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(soonest),),
            picker=pickers.best,
            reads_prefix=True,
            reads_forecast=True,
        )


def soonest(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
    """Return the score of each candidate: its negative expected TTFT in seconds."""
    return [-seconds for seconds in ttfts(query, candidates, cached_tokens(query, candidates))]
