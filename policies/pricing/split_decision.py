"""Decides whether a request is split: a pair of prefill and decode endpoints, or one endpoint for
both.

The module decides which requests cannot be split, applies the rule by uncached tokens, and chooses
a pair. The HTTP dialects of handoffs are in kvtransfer.dialects; the gateway handles failures of a
pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from policies import pickers, routing_algorithm
from policies.builtin_policies import DecodeLoad
from policies.filters import below_cap, has_room_to_decode, prefer_room_to_decode
from policies.latency.expected_latency import tpot_s, ttft_s
from policies.policy_types import (
    DECODE_PHASE,
    Filter,
    LinkLoad,
    PhasePrices,
    PhaseShare,
    Policy,
    WeightedScorer,
)
from policies.pricing.transfer_time import PendingTransfer, TransferTimes
from policies.routing_types import Candidate, Pick, Request, Role, RoutingQuery

DECODERS_TRIED = 3
"""Number of the cheapest decode endpoints of a group for which a prefill partner is priced."""

LATEST = 1.25
"""Number of TTFT budgets beyond which the time of a KV transfer does not raise the price further.

A request that is late in any case should go where it displaces no other.
"""


class SplitReason(StrEnum):
    """The reasons why a request is split between two endpoints or not: a metric label and a field
    of the access log.
    """

    # Enum's own __hash__ is a Python call, and every decision is counted by its reason.
    __hash__ = str.__hash__

    LONG = "long"  # split: the decode endpoint lacks enough of the prompt
    NO_SINGLE_ENDPOINT = "no_single_endpoint"  # split: no endpoint can serve the whole request
    PAIR_CHEAPER = "pair_cheaper"  # split: the pair costs less than any single endpoint
    WHOLE_CHEAPER = "whole_cheaper"  # not split: a single endpoint costs less
    # Not split: an endpoint that first fetches the prompt's cached beginning costs less.
    PULL_CHEAPER = "pull_cheaper"
    SHORT = "short"
    CACHED = "cached"
    ONE_TOKEN = "one_token"  # noqa: S105
    API = "api"  # not split: engines hand nothing over in this API
    CHOICES = "choices"
    PROMPTS = "prompts"
    PROMPT_SCORES = "prompt_scores"
    NO_PAIR = "no_pair"
    RECOMPUTE = "recompute"  # not split: a handoff failed, so one endpoint recomputes everything


# Enum member access is slow before Python 3.12, and every split request needs it.
_LONG = SplitReason.LONG


class SplitShape(msgspec.Struct, frozen=True):
    """The properties of a request that decide whether it can be split.

    choices        answers per prompt: the larger of n and best_of
    prompts        number of prompts in the request
    scores_prompt  whether log probabilities or an echo of the prompt are requested, for which the
                   decoder would compute all of it again
    max_tokens     the client's limit of output tokens; None without one
    can_hand_over  whether an engine can hand KV to another one in the request's API
    """

    choices: int = 1
    prompts: int = 1
    scores_prompt: bool = False
    max_tokens: int | None = None
    can_hand_over: bool = True


class SplitRule(msgspec.Struct, frozen=True):
    """When to split requests: the least number of uncached prompt tokens, and other parameters.

    threshold_tokens  least number of uncached prompt tokens of a split request
    hysteresis        half the width of a band around the threshold, as a share of the threshold.
                      Inside the band, the last decision outside the band is repeated, so that the
                      mode does not flap
    handoff_s         fixed seconds of a KV transfer, for policies that price a split (these need no
                      threshold)
    kv_token_s        seconds of a KV transfer per token, for the same policies, until handoffs have
                      been measured (default: 320 KiB per token at 50 GB/s)
    """

    threshold_tokens: int = 2048
    hysteresis: float = 0.25
    handoff_s: float = 0.01
    kv_token_s: float = 6.5e-6

    def __post_init__(self) -> None:
        if self.threshold_tokens < 1 or not 0.0 <= self.hysteresis < 1.0:
            raise ValueError(
                "invalid settings of splitting: threshold_tokens must be at least 1 (got "
                f"{self.threshold_tokens}), hysteresis 0 or more and below 1 ({self.hysteresis})"
            )
        if self.handoff_s < 0.0 or self.kv_token_s < 0.0:
            raise ValueError(
                "invalid settings of splitting: handoff_s and kv_token_s must not be negative, but "
                f"are {self.handoff_s} and {self.kv_token_s}"
            )


class PairGroup(msgspec.Struct, frozen=True):
    """The prefill and the decode endpoints whose KV caches are compatible.

    An endpoint with the role BOTH is in both tuples.

    compat  key that their KV caches have in common (`kv_compatibility_key`)
    """

    compat: str
    prefills: tuple[Candidate, ...]
    decodes: tuple[Candidate, ...]


class SplitPools(msgspec.Struct, frozen=True):
    """The endpoints that a splitting decision may choose from.

    groups  prefill and decode endpoints that can serve a split request together
    alone   endpoints that can serve a whole request
    """

    groups: tuple[PairGroup, ...]
    alone: tuple[Candidate, ...]


class EndpointPair(msgspec.Struct, frozen=True):
    """The two endpoints of a split request: one computes the prompt, a different one decodes.

    In a pull, the first one only hands over the beginning of the prompt that it has cached, and the
    second one computes the rest. Then the cached tokens of `decode` include those fetched.

    decode_wait_s  expected seconds at the decoder from the end of the transfer to the first token;
                   None where the pair was not chosen by price
    pulled_tokens  number of prompt tokens whose KV is fetched in a pull; 0: the request is split
    """

    prefill: Pick
    decode: Pick
    decode_wait_s: float | None = None
    pulled_tokens: int = 0

    @property
    def is_pull(self) -> bool:
        return self.pulled_tokens > 0

    def moved_tokens(self, prompt_tokens: int) -> int:
        """Return the number of tokens whose KV is sent, of a prompt of `prompt_tokens` tokens."""
        return self.pulled_tokens or prompt_tokens - self.decode.cached_tokens


class SplitDecision(msgspec.Struct, frozen=True):
    """Whether a request is split between two endpoints, between which ones, and why.

    pair       the two endpoints; None: one endpoint serves the whole request
    reason     why it was split or not
    splitting  whether the rule is now in the mode of splitting; pass it to the next decision
    score      the price of the choice, negative; None where there is no choice, or no price
    whole      the best single endpoint, with the prices of the others; None where none was priced
    """

    pair: EndpointPair | None
    reason: SplitReason
    splitting: bool
    score: float | None = None
    whole: Pick | None = None


def build_splitter(rule: SplitRule, policy: Policy) -> Splitter:
    """Return the object that decides which requests are split between two endpoints.

    It compares prices if the routing policy has prices for both phases, else it uses a threshold of
    prompt tokens.
    """
    crowded = msgspec.structs.replace(
        policy, filters=tuple(filter_ for filter_ in policy.filters if filter_ is not below_cap)
    )
    if policy.phase_prices is not None:
        filters, prices = (*policy.filters, prefer_room_to_decode), policy.phase_prices
        decode = cheapest_for_phase("decode_price", DECODE_PHASE, filters, prices)
        return PricedSplitter(rule, policy, decode, crowded)
    decode = DecodeLoad().build()
    decode = msgspec.structs.replace(decode, filters=(*decode.filters, prefer_room_to_decode))
    return Splitter(rule, policy, decode, crowded)


def cheapest_for_phase(
    name: str, part: PhaseShare, filters: tuple[Filter, ...], prices: PhasePrices
) -> Policy:
    """Return a policy that picks the cheapest endpoint for one phase of a split request.

    name     name of the policy
    part     the phase: prefill or decode
    filters  which endpoints may serve the request
    prices   function that computes the price of the phase at each endpoint
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        return [-price for price in prices(query, candidates, part)]

    return Policy(name, filters, (WeightedScorer(score),), pickers.best, reads_prefix=True)


def kv_compatibility_key(engine: str, model: str, labels: Mapping[str, str]) -> str:
    """Return a key that is equal for endpoints with compatible KV caches.

    It consists of the engine, the model, and the labels `version` and `kv_dtype`. An engine refuses
    a peer of another version in its handshake, but only after the prefill was
    computed.
    """
    return "/".join((engine, model, labels.get("version", ""), labels.get("kv_dtype", "")))


def transfer_s(
    rule: SplitRule,
    query: RoutingQuery,
    prefill: Candidate,
    decode: Pick,
    transfers: TransferTimes | None = None,
) -> float:
    """Return how many seconds after its prefill a prompt's KV has arrived at the decode endpoint.

    If the two network links are still busy with earlier transfers, that wait is included.
    `transfers` are measured times; if they are None, the constants of `rule` are used.
    """
    moved = query.request.prompt_tokens - decode.cached_tokens
    if transfers is None:
        return rule.handoff_s + moved * rule.kv_token_s
    names = prefill.endpoint.name, decode.candidate.endpoint.name
    speed = transfers.speed(names, rule.kv_token_s, query.now)
    service_s = rule.handoff_s + speed.service_s(moved)
    queue_s = transfers.backlog_s(names, query.now)
    if queue_s <= 0.0:
        return service_s
    return service_s + max(0.0, queue_s - computed_s(query, prefill))


def computed_s(query: RoutingQuery, prefill: Candidate) -> float:
    """Return the seconds from now until the prefill endpoint will have computed the prompt."""
    cached, slot = query.cached_by_slot, prefill.load.slot
    hit = cached[slot] if slot < len(cached) else 0
    return ttft_s(prefill.load, query.request.prompt_tokens - hit, hit, query.now)


def decode_wait_s(query: RoutingQuery, decode: Pick) -> float:
    """Return how many seconds a request will wait at the decode endpoint after its KV has arrived.

    The KV waits behind the prompts that this endpoint computes itself, or for free memory.
    """
    return ttft_s(decode.candidate.load, 0, query.request.prompt_tokens, query.now)


def begin_transfer(
    transfers: TransferTimes, rule: SplitRule, pair: EndpointPair, prompt_tokens: int, now: float
) -> PendingTransfer | None:
    """Record the KV transfer of a split request, so that later forecasts count it.

    transfers      the known transfers of the fleet
    rule           the constants for a fleet without measurements
    pair           the two endpoints
    prompt_tokens  number of tokens whose KV is sent
    now            the time in seconds

    Returns None where the pair was not chosen by price, because no transfer was forecast then.
    """
    if pair.decode_wait_s is None:
        return None
    names = pair.prefill.candidate.endpoint.name, pair.decode.candidate.endpoint.name
    return transfers.begin(names, pair.moved_tokens(prompt_tokens), rule.kv_token_s, now)


def generation_s(pair: EndpointPair, request: Request) -> float:
    """Return in how many seconds the decode endpoint is expected to generate the answer."""
    return request.output_tokens * tpot_s(pair.decode.candidate.load, request.prompt_tokens)


def end_transfer(transfer: PendingTransfer, pair: EndpointPair, first_token_at: float) -> None:
    """Record that a KV transfer has ended, because the request's first token has come.

    The expected wait at the decode endpoint is subtracted from the time of the token.
    """
    transfer.end(first_token_at - (pair.decode_wait_s or 0.0))


def unsplittable_reason(shape: SplitShape) -> SplitReason | None:
    """Return why a request cannot be split between two endpoints, or None if it can.

    Engines hand over the KV of one prompt and one choice, without scores of prompt tokens.
    """
    if not shape.can_hand_over:
        return SplitReason.API
    if shape.choices > 1:
        return SplitReason.CHOICES
    if shape.prompts > 1:
        return SplitReason.PROMPTS
    return SplitReason.PROMPT_SCORES if shape.scores_prompt else None


class Splitter(msgspec.Struct, frozen=True):
    """Decides about splitting requests by a threshold of uncached tokens.

    prefill  policy that chooses the prefill endpoint, by cached prefixes
    decode   policy that chooses the decode endpoint, by load
    crowded  policy that replaces `prefill` if all prefill endpoints are at their cap, and no
             endpoint can serve the request whole. It picks one where the request then queues
    """

    rule: SplitRule
    prefill: Policy
    decode: Policy
    crowded: Policy

    def decide(
        self,
        pools: SplitPools,
        query: RoutingQuery,
        shape: SplitShape,
        splitting: bool,
        transfers: TransferTimes | None = None,
    ) -> SplitDecision:
        """Decide whether to split one request, and choose the two endpoints for it.

        pools      the endpoints
        query      the request
        shape      the properties that decide whether it can be split
        splitting  whether the last decision was in the mode of splitting; False at first
        transfers  measured times of KV transfers, for rules that price them

        A request that no endpoint can serve whole is split even when that is slower.
        """
        why = unsplittable_reason(shape)
        if why is not None:
            return SplitDecision(None, why, splitting)
        pair = self.choose_pair(pools, query, transfers)
        if pair is None:
            return SplitDecision(None, SplitReason.NO_PAIR, splitting)
        reason, splitting = self._pays_off(
            query.request.prompt_tokens, pair.decode.cached_tokens, shape, splitting
        )
        if reason is not _LONG:
            if _has_candidate(pools.alone, query):
                return SplitDecision(None, reason, splitting)
            reason = SplitReason.NO_SINGLE_ENDPOINT
        return SplitDecision(pair, reason, splitting)

    def choose_pair(
        self, pools: SplitPools, query: RoutingQuery, transfers: TransferTimes | None = None
    ) -> EndpointPair | None:
        """Return the least loaded decode endpoint, and the best prefill endpoint for it.

        Returns None if there is no such pair.
        """
        groups = [group for group in pools.groups if _has_candidate(group.prefills, query)]
        if not groups:
            return None
        group, several = groups[0], len(groups) > 1
        decode = routing_algorithm.pick(
            self.decode, query, _decode_candidates(groups) if several else group.decodes
        )
        if decode is None:
            return None
        chosen = decode.candidate
        if several:
            group = next(group for group in groups if chosen in group.decodes)
        prefills = _partners(group.prefills, chosen, query)
        prefill = routing_algorithm.pick(self.prefill, query, prefills)
        if prefill is None and not _has_candidate(pools.alone, query):
            prefill = routing_algorithm.pick(self.crowded, query, prefills)
        return None if prefill is None else EndpointPair(prefill, decode)

    def _pays_off(
        self, prompt_tokens: int, cached_tokens: int, shape: SplitShape, splitting: bool
    ) -> tuple[SplitReason, bool]:
        if shape.max_tokens is not None and shape.max_tokens <= 1:
            return SplitReason.ONE_TOKEN, splitting
        width = self.rule.threshold_tokens * self.rule.hysteresis
        bound = self.rule.threshold_tokens + (-width if splitting else width)
        if prompt_tokens - cached_tokens >= bound:
            return _LONG, True
        return (SplitReason.CACHED if prompt_tokens >= bound else SplitReason.SHORT), False


class PricedSplitter(Splitter, frozen=True):
    """Splits a request when a pair of endpoints costs less than the best single endpoint.

    It needs no threshold and no hysteresis. Long prompts cost much where many answers are being
    generated, and busy prefill endpoints have long queues, so splitting starts and stops with the
    load. Endpoints that decode remain cheap for decoding and expensive for prefill, so roles form
    and dissolve by themselves.
    """

    def decide(
        self,
        pools: SplitPools,
        query: RoutingQuery,
        shape: SplitShape,
        splitting: bool,
        transfers: TransferTimes | None = None,
    ) -> SplitDecision:
        """Decide by comparing prices whether to split a request.

        The parameters are those of Splitter.decide. The decision contains `splitting` unchanged.
        """
        why = unsplittable_reason(shape)
        if why is not None:
            return SplitDecision(None, why, splitting)
        whole = routing_algorithm.pick(self.prefill, query, pools.alone)
        if whole is not None and shape.max_tokens is not None and shape.max_tokens <= 1:
            return SplitDecision(None, SplitReason.ONE_TOKEN, splitting, whole.score, whole)
        pair = self.choose_pair(pools, query, transfers)
        if pair is None:
            score = None if whole is None else whole.score
            return SplitDecision(None, SplitReason.NO_PAIR, splitting, score, whole)
        if whole is None:
            if _has_candidate(pools.alone, query):
                return SplitDecision(None, SplitReason.WHOLE_CHEAPER, splitting)
            return SplitDecision(pair, SplitReason.NO_SINGLE_ENDPOINT, splitting)
        score = pair.prefill.score + pair.decode.score
        if score > whole.score:
            return SplitDecision(pair, SplitReason.PAIR_CHEAPER, splitting, score, whole)
        return SplitDecision(None, SplitReason.WHOLE_CHEAPER, splitting, whole.score, whole)

    def choose_pair(
        self, pools: SplitPools, query: RoutingQuery, transfers: TransferTimes | None = None
    ) -> EndpointPair | None:
        """Return the prefill and the decode endpoint with the lowest sum of prices.

        Returns None if there are none. Of each group with compatible KV caches, the cheapest decode
        endpoints are tried, each with its cheapest prefill endpoint.
        """
        pairs = [
            pair
            for group in pools.groups
            for pair in self._pairs_of(group, pools, query, transfers)
        ]
        return max(pairs, key=lambda pair: pair.prefill.score + pair.decode.score, default=None)

    def _pairs_of(
        self,
        group: PairGroup,
        pools: SplitPools,
        query: RoutingQuery,
        transfers: TransferTimes | None,
    ) -> Iterator[EndpointPair]:
        cheapest = routing_algorithm.pick(self.decode, query, group.decodes)
        if cheapest is None:
            return
        ranked = sorted(
            zip(cheapest.scores, cheapest.candidates, strict=True), key=_score, reverse=True
        )
        others = [each for _, each in ranked if each is not cheapest.candidate]
        partners = _Partners(self, group.prefills, pools, query, transfers)
        decodes = [
            routing_algorithm.repick(cheapest, each, query.cached_by_slot)
            for each in others[: DECODERS_TRIED - 1]
        ]
        for decode in (cheapest, *decodes):
            pair = partners.pair_with(decode)
            if pair is not None:
                yield pair


class _Partners:
    # The prefill endpoints of a group, as partners of several decoders in one decision.
    #
    # What does not depend on the decoder is computed once: which endpoints may serve the request,
    # when each will have computed the prompt, and what is known of its link.

    __slots__ = ("_computed_s", "_forecast", "_kept", "_pools", "_prefills", "_query", "_splitter")

    def __init__(
        self,
        splitter: Splitter,
        prefills: tuple[Candidate, ...],
        pools: SplitPools,
        query: RoutingQuery,
        transfers: TransferTimes | None,
    ) -> None:
        self._splitter, self._prefills, self._pools = splitter, prefills, pools
        self._query = query
        self._forecast = None
        if transfers is not None:
            self._forecast = transfers.forecast(splitter.rule.kv_token_s, query.now)
        self._kept: Sequence[Candidate] | None = None
        self._computed_s: dict[int, float] = {}  # by slot

    def pair_with(self, decode: Pick) -> EndpointPair | None:
        # Return the decoder with its cheapest partner; None: there is none.
        query, prices = self._query, self._splitter.prefill.phase_prices
        if prices is None:
            return None
        candidates = self._candidates(decode.candidate)
        if not candidates:
            return None
        wait_s, most_s = decode_wait_s(query, decode), LATEST * query.request.slo.ttft_s
        moved_s, link_loads = self._transfers(candidates, decode)
        part = PhaseShare(
            decodes=0.0,
            transfers_s=[wait_s + min(most_s, each) for each in moved_s],
            link_loads=link_loads,
        )
        scores = [-price for price in prices(query, candidates, part)]
        index = pickers.best(query, candidates, scores)
        prefill = routing_algorithm.pick_of("prefill_price", query, candidates, scores, index)
        return EndpointPair(prefill, decode, wait_s)

    def _candidates(self, decoder: Candidate) -> Sequence[Candidate]:
        # Return the endpoints that may compute the prompt for this decoder.
        #
        # An endpoint is never its own partner, so one that does both has a list of its own.
        if decoder in self._prefills:
            return self._keep(_partners(self._prefills, decoder, self._query))
        if self._kept is None:
            self._kept = self._keep(self._prefills)
        return self._kept

    def _keep(self, prefills: Sequence[Candidate]) -> Sequence[Candidate]:
        query, splitter = self._query, self._splitter
        kept = routing_algorithm.keep(splitter.prefill, query, prefills)
        if not kept and not _has_candidate(self._pools.alone, query):
            kept = routing_algorithm.keep(splitter.crowded, query, prefills)
        return kept

    def _transfers(
        self, prefills: Sequence[Candidate], decode: Pick
    ) -> tuple[list[float], list[tuple[LinkLoad, LinkLoad]]]:
        # Return what transfer_s returns, for each prefill endpoint, and the loads of both links.
        #
        # The loads are empty if no times of transfers are known.
        query, rule, forecast = self._query, self._splitter.rule, self._forecast
        moved = query.request.prompt_tokens - decode.cached_tokens
        if forecast is None:
            return [rule.handoff_s + moved * rule.kv_token_s] * len(prefills), []
        known, computed, result = self._computed_s, computed_s, list[float]()
        link_loads = list[tuple[LinkLoad, LinkLoad]]()
        names, decoder = [each.endpoint.name for each in prefills], decode.candidate.endpoint.name
        links, receiving = forecast.links_to(decoder, names), forecast.waits((1, decoder))
        for prefill, (token_s, fixed_s, queue_s) in zip(prefills, links, strict=True):
            service_s = rule.handoff_s + (moved * token_s + fixed_s)
            sending = forecast.waits((0, prefill.endpoint.name))
            link_loads.append((LinkLoad(*sending, service_s), LinkLoad(*receiving, service_s)))
            if queue_s > 0.0:
                slot = prefill.load.slot
                ready_s = known.get(slot)
                if ready_s is None:
                    ready_s = known[slot] = computed(query, prefill)
                if queue_s > ready_s:
                    service_s += queue_s - ready_s
            result.append(service_s)
        return result, link_loads


def _score(ranked: tuple[float, Candidate]) -> float:
    return ranked[0]


def _has_candidate(candidates: Sequence[Candidate], query: RoutingQuery) -> bool:
    tried = query.failed_endpoints
    # a hot path; any() is slower
    for candidate in candidates:
        if candidate.load.is_available and candidate.endpoint.name not in tried:
            return True
    return False


def _partners(
    prefills: Sequence[Candidate], decoder: Candidate, query: RoutingQuery
) -> Sequence[Candidate]:
    # Return the endpoints that may compute the prompt for a decode endpoint, which is not among
    # them.
    #
    # KV that waits for memory at the decoder keeps memory at the prefill endpoint. If both do both
    # phases, each could be full of KV that waits for the other, and none would go on.
    if not has_room_to_decode(decoder, query):
        return [candidate for candidate in prefills if candidate.endpoint.role is Role.PREFILL]
    if decoder in prefills:
        return [candidate for candidate in prefills if candidate is not decoder]
    return prefills


def _decode_candidates(groups: Sequence[PairGroup]) -> Sequence[Candidate]:
    return [candidate for group in groups for candidate in group.decodes]
