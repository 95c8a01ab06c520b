"""Decides whether an endpoint fetches the beginning of a prompt that is stored elsewhere.

It may be in the memory or in the store of another endpoint, which sends it over a link, or in the
store of the same host. The price of each endpoint without a fetch is compared with its price with
one. The rest of the prompt is computed where the answer is generated.

The gateway uses `cheaper_pull`. An engine there sends KV only after a request of its own for the
beginning of the prompt, which waits in that engine's queue. Stores are fetched from only in
replays; the engines of a live fleet read theirs by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import msgspec

from policies import pickers, routing_algorithm
from policies.latency.expected_latency import prefill_s, ttft_s
from policies.policy_types import DECODE_PHASE, LinkLoad, PhaseShare, Policy
from policies.pricing.split_decision import (
    LATEST,
    EndpointPair,
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
        sources     the endpoints that may get a request for KV, which the policy's filters apply
                    to; None: the candidates send KV without a request
        """
        if sources is None:
            sources = candidates
        else:
            sources = routing_algorithm.keep(self._policy, query, sources)
        options = _Options(self, query, candidates, sources, transfers, stored)
        allowed = routing_algorithm.keep(self._policy, query, candidates)
        kept = [each for each in allowed if options.fetched(each) >= LEAST_PULL]
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
        size = max((each.load.slot for each in (*candidates, *sources)), default=-1) + 1
        self._cached = _padded(query.cached_by_slot, size)
        self._in_memory = list(map(max, self._cached, _padded(stored.in_memory, size)))
        self.held = list(map(max, self._in_memory, _padded(stored.in_all, size)))
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


def _padded(tokens: Sequence[int], size: int) -> list[int]:
    return [*tokens[:size], *[0] * (size - len(tokens))]


def cheaper_pull(
    pricer: PullPricer,
    decision: SplitDecision,
    pools: SplitPools,
    query: RoutingQuery,
    transfers: TransferTimes,
) -> SplitDecision:
    """Return a decision to pull the beginning of a prompt, or `decision` if that costs no more.

    decision  the cheapest choice without a pull: a pair of endpoints, or one endpoint
    """
    score = decision.score
    if score is None or max(query.cached_by_slot, default=0) < LEAST_PULL:
        return decision
    best: PullDecision | None = None
    for group in pools.groups:
        pull = pricer.decide(query, group.decodes, score, transfers, sources=group.prefills)
        if pull is not None:
            best, score = pull, pull.pick.score
    if best is None:
        return decision
    source = routing_algorithm.pick_of("pull_source", query, (best.source,), (score,), 0)
    pair = EndpointPair(source, best.pick, best.own_s, best.pulled_tokens)
    return SplitDecision(pair, SplitReason.PULL_CHEAPER, decision.splitting, score)


def patience_s(pair: EndpointPair, prompt_tokens: int, now: float) -> float:
    """Return how many seconds the request for a beginning may take before it is given up.

    It is the time in which the other endpoint would answer the whole prompt without a pull, so
    that a pull that fails at most doubles that time.
    """
    pick = pair.decode
    cached = pick.cached_tokens - pair.pulled_tokens
    return max(LEAST_PATIENCE_S, ttft_s(pick.candidate.load, prompt_tokens - cached, cached, now))
