"""The parameters of three built-in routing policies, and of one for decode endpoints.

Each `build()` returns a Policy. policy_registry.py maps the names in a configuration to these
structs.
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
    """A routing policy without parameters that uses the endpoints in turn."""

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

    It compares the load that gateways have reserved, then the scraped metrics.

    output_weight   cost of one expected output token, in prompt tokens
    request_tokens  fixed cost of a request in tokens, added to its own tokens
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
    """A routing policy that chooses the endpoint that has the least prefill work before the first
    token.

    Cached prefixes need no work. Prefill of tokens that another endpoint has cached is redundant,
    and costs extra because it slows down other requests.

    harm_weight      cost of each redundant token, per request in flight that it slows down
    patience_tokens  how many more tokens may be queued at an endpoint that has the prefix cached
    decode_weight    cost of one token of context or output in decoding, in prompt tokens
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

    It cannot be selected by name in a configuration.

    request_tokens   fixed cost of a request in tokens, added to its own tokens
    transfer_weight  cost of one token whose KV must be transferred, in decode tokens
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
