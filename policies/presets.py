"""The three policies that come with the house, each one value: the examples to read before writing another.

Parameters are frozen structs with defaults; registry.py finds them by name for the configuration.
"""

from __future__ import annotations

import msgspec

from policies import filters, pickers, scorers
from policies.bounds import Amount
from policies.contract import Filter, Policy, Scorer, Weighted

ORDINARY: tuple[Filter, ...] = (
    filters.available,
    filters.untried,
    filters.below_cap,
    filters.fits_context,
    filters.serves_tenant,
    filters.prefer_proven,
)


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a policy, all with defaults, and how to build it. Every build is a policy value of its own."""

    def build(self) -> Policy:
        raise NotImplementedError(f"{type(self).__name__} has no build()")


class RoundRobin(Preset, frozen=True):
    """Everybody in turn. No parameters."""

    def build(self) -> Policy:
        return Policy(
            name="round_robin",
            filters=ORDINARY,
            scorers=(Weighted(scorers.same()),),
            picker=pickers.Rotation(),
        )


class LeastLoaded(Preset, frozen=True):
    """Least outstanding work: booked tokens and requests first, scraped load second.

    output_weight   prompt tokens that one output token still to come counts for
    request_tokens  tokens that a request counts for besides its own
    fresh_s         how old a scrape may be to be believed, seconds
    """

    output_weight: Amount = 1.0
    request_tokens: Amount = 64.0
    fresh_s: Amount = 5.0

    def build(self) -> Policy:
        return Policy(
            name="least_loaded",
            filters=ORDINARY,
            scorers=(Weighted(scorers.outstanding(self.output_weight, self.request_tokens, self.fresh_s)),),
            picker=pickers.best,
        )


class PrefixAware(Preset, frozen=True):
    """Least prefill work ahead of the first token, cached prefixes counted as done, and little of it done twice.

    harm_weight      how much a wasted prefill is minded, per request in flight that it slows
    patience_tokens  how much longer a queue may be for the sake of a cached prefix, in prompt tokens
    decode_weight    prompt tokens that one token of context or output in generation counts for
    fresh_s          how old a scrape may be to be believed, seconds
    """

    harm_weight: Amount = 2.0
    patience_tokens: Amount = 65_536.0
    decode_weight: Amount = 0.02
    fresh_s: Amount = 5.0

    def build(self) -> Policy:
        return Policy(
            name="prefix_aware",
            filters=ORDINARY,
            scorers=(Weighted(self._scorer()),),
            picker=pickers.best,
            reads_prefix=True,
        )

    def _scorer(self) -> Scorer:
        return scorers.uncached_work(self.harm_weight, self.patience_tokens, self.decode_weight, self.fresh_s)


class DecodeLoad(Preset, frozen=True):
    """Who decodes a split request: least work in generation, and little to transfer. Not for configurations.

    request_tokens   tokens that a request counts for besides its own
    transfer_weight  tokens in generation that one token of KV to be transferred counts for
    fresh_s          how old a scrape may be to be believed, seconds
    """

    request_tokens: Amount = 64.0
    transfer_weight: Amount = 0.5
    fresh_s: Amount = 5.0

    def build(self) -> Policy:
        return Policy(
            name="decode_load",
            filters=ORDINARY,
            scorers=(Weighted(scorers.decode_load(self.request_tokens, self.transfer_weight, self.fresh_s)),),
            picker=pickers.best,
        )
