"""SGLang's routing rule: follow cached prefixes while loads are similar, else balance them."""

from __future__ import annotations

from collections.abc import Sequence

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.endpoint_load import EndpointLoad
from policies.param_types import Fraction, NonNegative, NonNegativeCount
from policies.policy_types import Policy, Scorer, WeightedScorer
from policies.published.rule_inputs import cached_tokens
from policies.routing_types import Candidate, RoutingQuery


class SglangCacheAware(PolicyParams, frozen=True):
    """A policy that picks the longest cached prefix while loads are similar, else the fewest
    requests.

    If no cached prefix is long enough, it picks the endpoint with the smallest cache tree, that is,
    with the fewest cached tokens.

    Source: `cache_aware` of SGLang's router and of its successor SMG
    (model_gateway/src/policies/cache_aware.rs), with its command-line defaults. Here, the size of a
    tree is the number of tokens that the endpoint is believed to have cached, and ages like the
    engine's cache. There, the tree is cut at `max_tree_size`. SMG's options for KV usage are off
    there by default, and are left out.

    cache_threshold        share of the prompt that some endpoint must have cached to be picked for
                           it
    balance_abs_threshold  loads count as unbalanced only if the largest and the smallest number of
                           requests differ by more than this
    balance_rel_threshold  the second condition: the largest number is more than this multiple of
                           the smallest
    """

    cache_threshold: Fraction = 0.3
    balance_abs_threshold: NonNegativeCount = 64
    balance_rel_threshold: NonNegative = 1.5

    def build(self) -> Policy:
        return Policy(
            name="sglang_cache_aware",
            filters=DEFAULT_FILTERS,
            scorers=(
                WeightedScorer(
                    cache_aware(
                        self.cache_threshold, self.balance_abs_threshold, self.balance_rel_threshold
                    )
                ),
            ),
            picker=pickers.best_with_tie_breakers(_requests, _tree),
            reads_prefix=True,
        )


def cache_aware(cache_threshold: float, most_apart: int, most_times: float) -> Scorer:
    """Return a scorer of the rule, whose score is one of three values:

    - the negative number of requests, while loads are unbalanced
    - cached tokens, if some endpoint has enough of the prompt cached
    - the negative size of the cache tree, otherwise

    The parameters `cache_threshold`, `most_apart` (balance_abs_threshold) and `most_times`
    (balance_rel_threshold) are those of SglangCacheAware.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        requests = [candidate.load.in_flight for candidate in candidates]
        most, fewest = max(requests), min(requests)
        if most - fewest > most_apart and most > most_times * fewest:
            return [-float(cached) for cached in requests]
        cached = cached_tokens(query, candidates)
        if max(cached) > cache_threshold * query.request.prompt_tokens:
            return [float(tokens) for tokens in cached]
        return [-candidate.load.prefix_cache_tokens for candidate in candidates]

    return score


def _requests(load: EndpointLoad) -> float:
    return load.in_flight


def _tree(load: EndpointLoad) -> float:
    return load.prefix_cache_tokens
