"""Three built-in routing policies, and one for decode endpoints, as parameter structs.

Each `build()` returns a Policy. policy_registry.py maps names in the configuration to them.
"""

from __future__ import annotations

import msgspec

from policies import filters, pickers, scorers
from policies.param_types import NonNegative
from policies.policy_types import Filter, Policy, Ranking, Scorer, WeightedScorer

DEFAULT_FILTERS: tuple[Filter, ...] = (
    filters.available,
    filters.untried,
    filters.below_cap,
    filters.fits_context,
    filters.serves_tenant,
    filters.prefer_proven,
)


class PolicyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base class for the parameters of a routing policy; every parameter has a default.

    Each `build()` returns a new, independent Policy.
    """

    def build(self) -> Policy:
        raise NotImplementedError(
            f"the parameter class {type(self).__name__} must implement build()"
        )


class RoundRobin(PolicyParams, frozen=True):
    """A routing policy without parameters that chooses endpoints in turn."""

    def build(self) -> Policy:
        rotation = pickers.Rotation()
        return Policy(
            name="round_robin",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(scorers.constant()),),
            picker=rotation,
            ranking=Ranking(rotation.last_turn),
        )


class LeastLoaded(PolicyParams, frozen=True):
    """A routing policy that chooses the endpoint with the least outstanding work.

    Reserved requests are compared first, then scraped load.

    output_weight   prompt tokens that one expected output token counts for
    request_tokens  tokens that a request counts for in addition to its own
    fresh_s         maximum age of scraped metrics in seconds
    """

    output_weight: NonNegative = 1.0
    request_tokens: NonNegative = 64.0
    fresh_s: NonNegative = 5.0

    def build(self) -> Policy:
        return Policy(
            name="least_loaded",
            filters=DEFAULT_FILTERS,
            scorers=(
                WeightedScorer(
                    scorers.outstanding_work(self.output_weight, self.request_tokens, self.fresh_s)
                ),
            ),
            picker=pickers.best,
            ranking=Ranking(
                scorers.reserved_work(self.output_weight, self.request_tokens),
                group=scorers.requests_from_outside,
            ),
        )


class PrefixAware(PolicyParams, frozen=True):
    """A routing policy that chooses the endpoint with the least prefill work before the first
    token.

    Cached prefixes need no work. Prefill that another endpoint has cached counts additionally as
    harm.

    harm_weight      weight of such a redundant prefill, per request in flight that it slows down
    patience_tokens  how much longer a queue may be for the sake of a cached prefix, in prompt
                     tokens
    decode_weight    prompt tokens that one token of context or output in decoding counts for
    fresh_s          maximum age of scraped metrics in seconds
    """

    harm_weight: NonNegative = 2.0
    patience_tokens: NonNegative = 65_536.0
    decode_weight: NonNegative = 0.02
    fresh_s: NonNegative = 5.0

    def build(self) -> Policy:
        return Policy(
            name="prefix_aware",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(self._scorer()),),
            picker=pickers.best,
            reads_prefix=True,
            ranking=Ranking(
                scorers.queued_work(self.decode_weight),
                group=scorers.requests_in_flight,
                is_settled=scorers.has_room_and_own_requests_only,
            ),
        )

    def _scorer(self) -> Scorer:
        return scorers.uncached_work(
            self.harm_weight, self.patience_tokens, self.decode_weight, self.fresh_s
        )


class DecodeLoad(PolicyParams, frozen=True):
    """A policy for the decode endpoint of a split request: little decode work, little KV to
    transfer.

    It cannot be configured by name.

    request_tokens   tokens that a request counts for in addition to its own
    transfer_weight  decode tokens that one token of KV to be transferred counts for
    fresh_s          maximum age of scraped metrics in seconds
    """

    request_tokens: NonNegative = 64.0
    transfer_weight: NonNegative = 0.5
    fresh_s: NonNegative = 5.0

    def build(self) -> Policy:
        return Policy(
            name="decode_load",
            filters=DEFAULT_FILTERS,
            scorers=(
                WeightedScorer(
                    scorers.decode_load(self.request_tokens, self.transfer_weight, self.fresh_s)
                ),
            ),
            picker=pickers.best,
        )
