"""Preble's E2: exploit a cached prefix where it outweighs the rest of the prompt, explore by load otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from policies import pickers
from policies.bounds import Amount, Count, Positive
from policies.contract import Policy, Weighted
from policies.latency import tpot_s
from policies.load import EndpointLoad
from policies.model import Ask, Candidate
from policies.presets import ORDINARY, Preset
from policies.published.view import held, prefill_s


class Preble(Preset, frozen=True):
    """Longest cached prefix if it is most of the prompt, else least load, prefill and eviction cost together.

    Preble (ICLR'25), algorithm E2: exploit among the holders of the longest match, by load, if it is longer than what
    is left of the prompt. Else least L + P + M, in seconds of GPU: L what the endpoint was given in the last
    `window_s` (prefills of misses, and generation), P this prefill there, M what computing evicted prefixes again
    would cost, times how often they hit. The heaviest gives way to the lightest beyond `rebalance_ratio`, once
    `rebalance_after` requests are in the window (both as in its code). Spreading of hot subtrees follows from that;
    its order inside an engine's queue is the engine's.

    window_s         seconds of history that count as load
    rebalance_ratio  how many times the lightest load the heaviest may be
    rebalance_after  requests in the window before loads are compared
    """

    window_s: Positive = 180.0
    rebalance_ratio: Amount = 1.5
    rebalance_after: Count = 50

    def build(self) -> Policy:
        e2 = ExploitExplore(self.window_s, self.rebalance_ratio, self.rebalance_after)
        return Policy(
            name="preble",
            filters=ORDINARY,
            scorers=(Weighted(e2.score),),
            picker=e2.pick,
            reads_prefix=True,
            reads_beliefs=True,
        )


class ExploitExplore:
    """The rule with its window of past picks. Owned by the policy value it was built for."""

    __slots__ = ("_lightest", "_rebalance_after", "_rebalance_ratio", "_window")

    def __init__(self, window_s: float, rebalance_ratio: float, rebalance_after: int) -> None:
        self._window = Window(window_s)
        self._rebalance_ratio = rebalance_ratio
        self._rebalance_after = rebalance_after
        self._lightest = pickers.best_then(self._load)

    def score(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """Cached tokens when exploiting, else minus seconds of GPU."""
        window, prompt = self._window, ask.request.prompt_tokens
        window.expire(ask.now)
        window.forget(ask.request.id)  # asked again, it is not its own competitor
        mine = held(ask, candidates)
        loads = [window.seconds(candidate.load.slot) for candidate in candidates]
        longest = max(mine)
        if longest <= prompt - longest:
            return [
                -seconds - self._new_s(candidate.load, prompt - cached, cached)
                for candidate, cached, seconds in zip(candidates, mine, loads, strict=True)
            ]
        least = min(
            seconds for seconds, cached in zip(loads, mine, strict=True) if cached == longest
        )
        if self._crooked(least, loads):
            return [-seconds for seconds in loads]
        return [float(tokens) for tokens in mine]

    def pick(self, ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        """The best score, the lightest of those; remembered as load."""
        chosen = self._lightest(ask, candidates, scores)
        load, request = candidates[chosen].load, ask.request
        (cached,) = held(ask, (candidates[chosen],))
        seconds = prefill_s(load, request.prompt_tokens - cached, cached)
        batch = 1.0 + sum(each.load.decoding for each in candidates) / len(candidates)
        seconds += request.output_tokens * tpot_s(load, request.prompt_tokens) / batch
        self._window.add(
            Given(ask.now, request.id, load.slot, seconds, cached, request.prompt_tokens)
        )
        return chosen

    def _load(self, load: EndpointLoad) -> float:
        return self._window.seconds(load.slot)

    def _new_s(self, load: EndpointLoad, new: int, cached: int) -> float:
        """P + M"""
        seconds = prefill_s(load, new, cached)
        if load.kv_tokens is not None and load.held_tokens + new > load.kv_tokens:
            evicted = min(new, int(load.held_tokens + new - load.kv_tokens))
            seconds += prefill_s(load, evicted, 0) * self._window.hit_share(load.slot)
        return seconds

    def _crooked(self, chosen: float, loads: Sequence[float]) -> bool:
        heaviest = max(loads)
        apart = heaviest > self._rebalance_ratio * min(loads)
        return apart and chosen == heaviest and len(self._window) >= self._rebalance_after


class Given:
    """One pick: when, which request, where, its seconds of GPU, its cached and its prompt tokens."""

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


class Window:
    """What each slot was given in the last `window_s`. A request picked again (a retry, a split not made) moves."""

    __slots__ = ("_by_id", "_given", "_sums", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._given: deque[Given] = deque()
        self._by_id: dict[str, Given] = {}
        self._sums: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def seconds(self, slot: int) -> float:
        """Of GPU, given to this slot."""
        sums = self._sums.get(slot)
        return sums[0] if sums else 0.0

    def hit_share(self, slot: int) -> float:
        """Cached share of the prompts given to this slot; 0 before the first."""
        sums = self._sums.get(slot)
        return sums[1] / sums[2] if sums and sums[2] > 0.0 else 0.0

    def add(self, given: Given) -> None:
        self.forget(given.id)
        self._given.append(given)
        self._by_id[given.id] = given
        self._count(given, 1.0)

    def expire(self, now: float) -> None:
        """Forgets what was given before the window; an entry that moved is dropped when its turn comes."""
        given, oldest = self._given, now - self._window_s
        while given and given[0].at < oldest:
            past = given.popleft()
            if self._by_id.get(past.id) is past:
                self.forget(past.id)

    def forget(self, request: str) -> None:
        """As if this request had never been given to anybody."""
        past = self._by_id.pop(request, None)
        if past is not None:
            self._count(past, -1.0)

    def _count(self, given: Given, sign: float) -> None:
        sums = self._sums.setdefault(given.slot, [0.0, 0.0, 0.0, 0.0])
        sums[3] += sign
        if sums[3] == 0.0:  # nothing left: what rounding would leave is nothing too
            del self._sums[given.slot]
            return
        sums[0] += sign * given.seconds
        sums[1] += sign * given.cached
        sums[2] += sign * given.prompt
