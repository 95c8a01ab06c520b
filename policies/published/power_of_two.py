"""The routing rule "power of two choices": use the less loaded of two endpoints drawn at random."""

from __future__ import annotations

from policies import pickers, scorers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.param_types import NonNegative
from policies.policy_types import Policy, WeightedScorer


class PowerOfTwo(PolicyParams, frozen=True):
    """A policy that draws two endpoints at random and picks the one with fewer requests.

    Sources: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001);
    `power_of_two` of SGLang's router.

    fresh_s  maximum age in seconds of scraped metrics, for external requests
    """

    fresh_s: NonNegative = 5.0

    def build(self) -> Policy:
        return Policy(
            name="power_of_two",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(scorers.fewest_requests(self.fresh_s)),),
            picker=pickers.better_of_two,
        )
