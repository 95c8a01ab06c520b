"""Decides whether an endpoint fetches the beginning of a prompt that is stored elsewhere.

It may be in the memory or in the store of another endpoint, which sends it over a link, or in the
store of the same host. The price of each endpoint without a fetch is compared with its price with
one. The rest of the prompt is computed where the answer is generated.

The gateway uses `cheaper_pull`. An engine there sends KV only after a request of its own for the
beginning of the prompt, which waits in that engine's queue. Stores are fetched from only in
replays; the engines of a live fleet read theirs by themselves.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import nsmallest
from math import inf
from typing import NamedTuple

import msgspec

from policies import pickers, routing_algorithm
from policies.latency.expected_latency import backlog_s, prefill_s, ttft_s
from policies.policy_types import DECODE_PHASE, LinkLoad, PhaseShare, Policy
from policies.pricing.split_decision import (
    LATEST,
    EndpointPair,
    PairGroup,
    SplitDecision,
    SplitPools,
    SplitReason,
    SplitRule,
)
from policies.pricing.transfer_time import PendingTransfer, TransferForecast, TransferTimes
from policies.routing_types import Candidate, Pick, RoutingQuery

LEAST_PULL = 1024
"""Smallest number of prompt tokens for which a fetch is considered."""

LEAST_PATIENCE_S = 0.25
"""Least number of seconds after which the request for a beginning is given up."""

LEAST_LOSS = 0.01
"""Least price of an endpoint with the cached tokens for which the gateway considers a pull.

A pull saves at most that price, which is in requests lost by delays.
"""

MOST_PRICED = 8
"""Maximum number of endpoints that are priced with a pull by the gateway, and of their sources."""

_IDLE = LinkLoad(0, 0.0, 0.0)


class PullDecision(msgspec.Struct, frozen=True):
    """An endpoint that serves a request, and where it first fetches the beginning of the prompt.

    pick           the endpoint; its cached tokens are those after the fetch
    source         the endpoint whose memory or store has the KV; the same one: its host's store
    pulled_tokens  number of tokens whose KV is fetched
    own_s          expected seconds to the first token after the fetch, without a queue: the engine
                   computes other prompts during the fetch
    """

    pick: Pick
    source: Candidate
    pulled_tokens: int
    own_s: float

    @property
    def is_remote(self) -> bool:
        """Return whether another endpoint sends the KV."""
        return self.source is not self.pick.candidate


class StoreTimes(NamedTuple):
    """How long the host of an endpoint takes to read KV from its store, in seconds per token.

    memory_token_s  from host memory to the GPUs
    disk_token_s    from disk to host memory, in addition
    """

    memory_token_s: float = 0.0
    disk_token_s: float = 0.0


class StoredTokens(NamedTuple):
    """How many tokens of a prompt each endpoint has with its host, from the first one on, by slot.

    in_memory  tokens in GPU memory or in host memory
    in_all     the same, or on disk
    """

    in_memory: Sequence[int] = ()
    in_all: Sequence[int] = ()


NO_STORE, NOTHING_STORED = StoreTimes(), StoredTokens()


class PullPricer:
    """Finds the cheapest fetch of a prompt's beginning, by the prices of a routing policy.

    policy        the routing policy, which has prices of phases
    rule          the time of a transfer between endpoints until some were measured
    store         the times of a fetch from a store
    by_request    whether the source sends KV only after a request for the beginning, which waits in
                  its queue
    """

    def __init__(
        self,
        policy: Policy,
        rule: SplitRule,
        store: StoreTimes = NO_STORE,
        *,
        by_request: bool = False,
    ) -> None:
        assert policy.phase_prices is not None
        self._policy, self._prices, self._rule = policy, policy.phase_prices, rule
        self._store, self._by_request = store, by_request

    def decide(
        self,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        score: float,
        transfers: TransferTimes | None,
        stored: StoredTokens = NOTHING_STORED,
        sources: Sequence[Candidate] | None = None,
    ) -> PullDecision | None:
        """Return the cheapest fetch, or None if its score is not higher than `score`.

        candidates  the endpoints that may serve the request
        score       score of the best choice without a fetch: its price, negative
        transfers   the measured times of transfers between endpoints, and those in progress; None:
                    endpoints send each other nothing
        stored      what the stores of the endpoints' hosts are believed to have
        sources     the endpoints that may get a request for KV; None: the candidates send KV
                    without a request
        """
        sources = candidates if sources is None else sources
        options = _Options(self, query, candidates, sources, transfers, stored)
        kept = [
            each for each in self.keep(query, candidates) if options.fetched(each) >= LEAST_PULL
        ]
        if not kept:
            return None
        pick = self._cheapest(query, kept, options)
        if pick.score <= score:
            return None
        chosen, prompt = pick.candidate, query.request.prompt_tokens
        own_s = chosen.load.fixed_ttft_s + prefill_s(
            chosen.load, prompt - pick.cached_tokens, pick.cached_tokens
        )
        return PullDecision(pick, options.source_of(chosen), options.fetched(chosen), own_s)

    def _cheapest(self, query: RoutingQuery, kept: Sequence[Candidate], options: _Options) -> Pick:
        part = options.part(kept)
        after = msgspec.structs.replace(query, cached_by_slot=options.after)
        # The KV that arrives takes memory and displaces other blocks like KV computed here. So
        # this part of the price counts what the endpoint itself has cached.
        prefills, decodes = self._prices(after, kept, part), self._prices(query, kept, DECODE_PHASE)
        scores = [-(prefill + decode) for prefill, decode in zip(prefills, decodes, strict=True)]
        index = pickers.best(after, kept, scores)
        return routing_algorithm.pick_of("pull", after, kept, scores, index)

    def keep(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates that may get this request by the policy's filters."""
        return routing_algorithm.keep(self._policy, query, candidates)

    def begin(
        self, pull: PullDecision, transfers: TransferTimes | None, now: float
    ) -> PendingTransfer | None:
        """Record that KV is sent from now on; returns None if no other endpoint sends it."""
        if transfers is None or not pull.is_remote:
            return None
        names = pull.source.endpoint.name, pull.pick.candidate.endpoint.name
        transfer = transfers.begin(names, pull.pulled_tokens, self._rule.kv_token_s, now)
        transfer.on_ready(now)
        return transfer

    def end(
        self,
        pull: PullDecision,
        transfers: TransferTimes,
        transfer: PendingTransfer,
        began_s: float,
        first_token_at: float,
    ) -> None:
        """Learn how long a transfer took, from the first token of its request."""
        transfer.end(first_token_at - pull.own_s)
        transfers.learn(transfer, began_s + self._rule.handoff_s, first_token_at)

    def forecast(self, transfers: TransferTimes, now: float) -> TransferForecast:
        return transfers.forecast(self._rule.kv_token_s, now)

    def source_s(self, query: RoutingQuery, source: Candidate, held: int) -> float:
        """Return the seconds until the source has answered the request for the beginning."""
        return ttft_s(source.load, 1, held, query.now) if self._by_request else 0.0

    def handoff_s(self, moved: int, token_s: float, fixed_s: float) -> float:
        return self._rule.handoff_s + moved * token_s + fixed_s

    def restore_s(self, moved: int) -> float:
        return moved * self._store.memory_token_s

    def disk_s(self, tokens: int) -> float:
        return max(0, tokens) * self._store.disk_token_s


class _Options:
    # What each candidate may fetch for one request, and from where.

    __slots__ = (
        "_cached",
        "_forecast",
        "_in_memory",
        "_pricer",
        "_query",
        "_source",
        "_source_s",
        "after",
        "held",
    )

    def __init__(
        self,
        pricer: PullPricer,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        sources: Sequence[Candidate],
        transfers: TransferTimes | None,
        stored: StoredTokens,
    ) -> None:
        self._pricer, self._query = pricer, query
        slots = [each.load.slot for each in (*candidates, *sources)]
        size = max(slots, default=-1) + 1
        self._cached = _padded(query.cached_by_slot, slots, size)
        self._in_memory = list(map(max, self._cached, _padded(stored.in_memory, slots, size)))
        self.held = list(map(max, self._in_memory, _padded(stored.in_all, slots, size)))
        self._forecast = None if transfers is None else pricer.forecast(transfers, query.now)
        self._source_s = 0.0
        self._source = None if self._forecast is None else self._best(sources, self._forecast)
        most = 0 if self._source is None else self.held[self._source.load.slot]
        # by slot, the tokens that are cached after the fetch
        self.after = [max(most, held) for held in self.held]

    def _best(
        self, candidates: Sequence[Candidate], forecast: TransferForecast
    ) -> Candidate | None:
        # Return the endpoint that can send most of the prompt; of equal ones, the least busy one.
        most, source, least_s = LEAST_PULL - 1, None, inf
        for candidate in candidates:
            held = self.held[candidate.load.slot]
            if held < most or not candidate.load.is_available:
                continue
            source_s = self._pricer.source_s(self._query, candidate, held)
            wait_s = source_s + forecast.waits((0, candidate.endpoint.name))[1]
            if held > most or wait_s < least_s:
                most, source, least_s, self._source_s = held, candidate, wait_s, source_s
        return source

    def fetched(self, candidate: Candidate) -> int:
        slot = candidate.load.slot
        return self.after[slot] - self._cached[slot]

    def source_of(self, candidate: Candidate) -> Candidate:
        slot = candidate.load.slot
        if self._source is None or self.held[slot] == self.after[slot]:
            return candidate
        return self._source

    def part(self, candidates: Sequence[Candidate]) -> PhaseShare:
        most_s = LATEST * self._query.request.slo.ttft_s
        seconds, loads = list[float](), list[tuple[LinkLoad, LinkLoad]]()
        for candidate in candidates:
            source, moved = self.source_of(candidate), self.fetched(candidate)
            after = self.after[candidate.load.slot]
            disk_s = self._pricer.disk_s(after - self._in_memory[source.load.slot])
            if source is candidate or self._forecast is None:
                seconds.append(min(most_s, disk_s + self._pricer.restore_s(moved)))
                loads.append((_IDLE, _IDLE))
                continue
            names = source.endpoint.name, candidate.endpoint.name
            token_s, fixed_s, queue_s = self._forecast.links_to(names[1], (names[0],))[0]
            service_s = self._pricer.handoff_s(moved, token_s, fixed_s)
            # The link moves earlier transfers while the request for the beginning waits.
            wait_s = max(self._source_s, queue_s)
            seconds.append(min(most_s, disk_s + wait_s + service_s))
            sending, receiving = (self._forecast.waits(end) for end in enumerate(names))
            loads.append((LinkLoad(*sending, service_s), LinkLoad(*receiving, service_s)))
        return PhaseShare(decodes=0.0, transfers_s=seconds, link_loads=loads)


def _tokens(by_slot: Sequence[int], slot: int) -> int:
    return by_slot[slot] if slot < len(by_slot) else 0


def _padded(tokens: Sequence[int], slots: Sequence[int], size: int) -> list[int]:
    # Return the tokens of these slots by slot. The sequence may look each one up (PrefixMatch).
    padded = [0] * size
    for slot in slots:
        padded[slot] = _tokens(tokens, slot)
    return padded


def cheaper_pull(
    pricer: PullPricer,
    decision: SplitDecision,
    pools: SplitPools,
    query: RoutingQuery,
    transfers: TransferTimes,
    paused: Container[str] = (),
) -> SplitDecision:
    """Return a decision to pull the beginning of a prompt, or `decision` if that costs no more.

    decision  the cheapest choice without a pull: a pair of endpoints, or one endpoint
    paused    names of endpoints that are not to be sources
    """
    score, whole, cached = decision.score, decision.whole, query.cached_by_slot
    most = max(cached, default=0)
    if score is None or whole is None or most < LEAST_PULL or _suffices(decision, most):
        return decision
    best: PullDecision | None = None
    for group in pools.groups:
        sources = _sources(pricer, group, query, paused)
        if not sources:
            continue
        held = _tokens(cached, sources[0].load.slot)
        candidates = _shortlist(whole, group, cached, held - LEAST_PULL)
        pull = pricer.decide(query, candidates, score, transfers, sources=sources)
        if pull is not None:
            best, score = pull, pull.pick.score
    if best is None:
        return decision
    source = routing_algorithm.pick_of("pull_source", query, (best.source,), (score,), 0)
    pair = EndpointPair(source, best.pick, best.own_s, best.pulled_tokens)
    return SplitDecision(pair, SplitReason.PULL_CHEAPER, decision.splitting, score)


def _suffices(decision: SplitDecision, most: int) -> bool:
    # Return whether a single endpoint was chosen that lacks little, and costs next to nothing.
    #
    # A busy one is no exit: answers are delayed there, even by the few tokens that are not cached.
    whole = decision.whole
    if decision.pair is not None or whole is None:
        return False
    return most - whole.cached_tokens < LEAST_PULL and -whole.score < LEAST_LOSS


def _sources(
    pricer: PullPricer, group: PairGroup, query: RoutingQuery, paused: Container[str]
) -> Sequence[Candidate]:
    # Return the endpoints that have most of the prompt and may get a request for it.
    #
    # If many are equal, as with a common system prompt, these are the ones with least to compute.
    cached = query.cached_by_slot
    holders = [
        each
        for each in group.prefills
        if _tokens(cached, each.load.slot) >= LEAST_PULL and each.endpoint.name not in paused
    ]
    holders = [each for each in pricer.keep(query, holders) if each.load.is_available]
    most = max((cached[each.load.slot] for each in holders), default=0)
    equal = [each for each in holders if cached[each.load.slot] == most]
    return nsmallest(MOST_PRICED, equal, key=lambda each: backlog_s(each.load, query.now))


def _shortlist(
    whole: Pick, group: PairGroup, cached: Sequence[int], most_cached: int
) -> list[Candidate]:
    # Return the cheapest endpoints without a pull that have at most `most_cached` tokens cached.
    scores, candidates = whole.scores, whole.candidates
    shortlist = list[Candidate]()
    for index in sorted(range(len(scores)), key=scores.__getitem__, reverse=True):
        candidate = candidates[index]
        if _tokens(cached, candidate.load.slot) <= most_cached and candidate in group.decodes:
            shortlist.append(candidate)
            if len(shortlist) == MOST_PRICED:
                break
    return shortlist


def patience_s(pair: EndpointPair, prompt_tokens: int, now: float) -> float:
    """Return how many seconds the request for a beginning may take before it is given up.

    It is the time in which the other endpoint would answer the whole prompt without a pull, so
    that a pull that fails at most doubles that time.
    """
    pick = pair.decode
    cached = pick.cached_tokens - pair.pulled_tokens
    return max(LEAST_PATIENCE_S, ttft_s(pick.candidate.load, prompt_tokens - cached, cached, now))
