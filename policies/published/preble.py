"""Preble's routing rule E2: an endpoint with a long cached prefix, otherwise the least loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.endpoint_load import EndpointLoad
from policies.latency.expected_latency import tpot_s
from policies.param_types import NonNegative, NonNegativeCount, Positive
from policies.policy_types import Policy, WeightedScorer
from policies.published.rule_inputs import cached_tokens, prefill_s
from policies.routing_types import Candidate, RoutingQuery


class Preble(PolicyParams, frozen=True):
    """A policy that follows a long cached prefix, and otherwise picks the lowest cost.

    If the longest cached prefix is more than half of the prompt, the least loaded endpoint that has
    it is picked. Otherwise the endpoint with the lowest L + P + M in GPU seconds is picked:

    - L: the work that the endpoint was sent in the last `window_s` (prefill of misses, and
      decoding)
    - P: the prefill of this prompt there
    - M: the cost of recomputing evicted prefixes, times their hit rate

    To balance loads, the most loaded endpoint is replaced by the least loaded one if the ratio of
    their loads exceeds `rebalance_ratio`, and the window has at least `rebalance_after` requests.
    Source: Preble (ICLR'25), algorithm E2 and its code. Its order within an engine's queue is left
    to the engine.

    window_s         seconds of history that count as load
    rebalance_ratio  maximum ratio of the largest to the smallest load
    rebalance_after  number of requests in the window before loads are compared
    """

    window_s: Positive = 180.0
    rebalance_ratio: NonNegative = 1.5
    rebalance_after: NonNegativeCount = 50

    def build(self) -> Policy:
        e2 = ExploitExplore(self.window_s, self.rebalance_ratio, self.rebalance_after)
        return Policy(
            name="preble",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(e2.score),),
            picker=e2.pick,
            reads_prefix=True,
            reads_forecast=True,
        )


class ExploitExplore:
    """Scores and picks by Preble's rule E2: a long cached prefix, otherwise the lowest cost.

    It remembers the picks of a time window, so each policy needs its own.
    """

    __slots__ = ("_lightest", "_rebalance_after", "_rebalance_ratio", "_window")

    def __init__(self, window_s: float, rebalance_ratio: float, rebalance_after: int) -> None:
        self._window = SentWindow(window_s)
        self._rebalance_ratio = rebalance_ratio
        self._rebalance_after = rebalance_after
        self._lightest = pickers.best_with_tie_breakers(self._load)

    def score(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        """Return the scores of the candidates; the highest is best.

        They are cached tokens if a cached prefix is most of the prompt, otherwise negative GPU
        seconds.
        """
        window, prompt = self._window, query.request.prompt_tokens
        window.expire(query.now)
        window.forget(query.request.id)  # a repeated request must not compete with itself
        hits = cached_tokens(query, candidates)
        loads = [window.seconds(candidate.load.slot) for candidate in candidates]
        longest = max(hits)
        if longest <= prompt - longest:
            return [
                -seconds - self._new_s(candidate.load, prompt - cached, cached)
                for candidate, cached, seconds in zip(candidates, hits, loads, strict=True)
            ]
        least = min(
            seconds for seconds, cached in zip(loads, hits, strict=True) if cached == longest
        )
        if self._is_unbalanced(least, loads):
            return [-seconds for seconds in loads]
        return [float(tokens) for tokens in hits]

    def pick(
        self, query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]
    ) -> int:
        """Return the index of the best score, and record the pick as load of its endpoint.

        If scores are equal, the least loaded endpoint is picked.
        """
        index = self._lightest(query, candidates, scores)
        load, request = candidates[index].load, query.request
        (cached,) = cached_tokens(query, (candidates[index],))
        seconds = prefill_s(load, request.prompt_tokens - cached, cached)
        batch = 1.0 + sum(candidate.load.decoding for candidate in candidates) / len(candidates)
        seconds += request.output_tokens * tpot_s(load, request.prompt_tokens) / batch
        self._window.add(
            SentWork(query.now, request.id, load.slot, seconds, cached, request.prompt_tokens)
        )
        return index

    def _load(self, load: EndpointLoad) -> float:
        return self._window.seconds(load.slot)

    def _new_s(self, load: EndpointLoad, new: int, cached: int) -> float:
        seconds = prefill_s(load, new, cached)
        if load.kv_tokens is not None and load.prefix_cache_tokens + new > load.kv_tokens:
            evicted = min(new, int(load.prefix_cache_tokens + new - load.kv_tokens))
            seconds += prefill_s(load, evicted, 0) * self._window.hit_share(load.slot)
        return seconds

    def _is_unbalanced(self, chosen: float, loads: Sequence[float]) -> bool:
        heaviest = max(loads)
        is_apart = heaviest > self._rebalance_ratio * min(loads)
        return is_apart and chosen == heaviest and len(self._window) >= self._rebalance_after


class SentWork:
    """One past pick of Preble's rule, which counts as load of its endpoint for some time.

    It has the time, the request, the endpoint (slot), the work in GPU seconds, and the numbers of
    cached and of all prompt tokens.
    """

    __slots__ = ("at", "cached", "id", "prompt", "seconds", "slot")

    def __init__(
        self, at: float, request: str, slot: int, seconds: float, cached: int, prompt: int
    ) -> None:
        self.at = at
        self.id = request
        self.slot = slot
        self.seconds = seconds
        self.cached = cached
        self.prompt = prompt


class SentWindow:
    """The work that each endpoint (slot) was sent in the last `window_s` seconds.

    If a request is picked again, for a retry or after a rejected split, it moves to its new slot.
    """

    __slots__ = ("_by_id", "_given", "_sums", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._given: deque[SentWork] = deque()
        self._by_id: dict[str, SentWork] = {}
        self._sums: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def seconds(self, slot: int) -> float:
        """Return the GPU seconds of work that the endpoint in this slot was sent within the
        window.
        """
        sums = self._sums.get(slot)
        return sums[0] if sums else 0.0

    def hit_share(self, slot: int) -> float:
        """Return the cached share (0 to 1) of the prompts sent to the endpoint in this slot.

        Returns 0 if no prompt was sent within the window.
        """
        sums = self._sums.get(slot)
        return sums[1] / sums[2] if sums and sums[2] > 0.0 else 0.0

    def add(self, given: SentWork) -> None:
        self.forget(given.id)
        self._given.append(given)
        self._by_id[given.id] = given
        self._count(given, 1.0)

    def expire(self, now: float) -> None:
        """Remove work that is older than `window_s` seconds at the time `now`."""
        given, oldest = self._given, now - self._window_s
        while given and given[0].at < oldest:
            past = given.popleft()
            if self._by_id.get(past.id) is past:
                self.forget(past.id)

    def forget(self, request: str) -> None:
        """Remove a request from the window, because it was not served where it had been sent."""
        past = self._by_id.pop(request, None)
        if past is not None:
            self._count(past, -1.0)

    def _count(self, given: SentWork, sign: float) -> None:
        sums = self._sums.setdefault(given.slot, [0.0, 0.0, 0.0, 0.0])
        sums[3] += sign
        if sums[3] == 0.0:  # no request is left, so remove rounding errors as well
            del self._sums[given.slot]
            return
        sums[0] += sign * given.seconds
        sums[1] += sign * given.cached
        sums[2] += sign * given.prompt
