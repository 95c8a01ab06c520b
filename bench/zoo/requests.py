"""Generates the requests of a random workload: arrivals, lengths, and prefixes that prompts share.

Arrival times are in units of the mean gap between requests, so that a simulation can set the rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import log, pi, sin
from random import Random

import msgspec

from bench.zoo.space import Workload
from planner.text_generator import BLOCK_TOKENS
from planner.traces.recorded_request import PRIVATE, TraceRequest

SHORTEST_PROMPT, LONGEST_PROMPT = 60, 120_000
SHORTEST_ANSWER, LONGEST_ANSWER = 5, 6_000
LONG_SHARE = 0.2
"""Share of long answers in workloads of the kind `tail`."""

TREE_DEPTH = 3
TREE_BRANCHES = 6


class Requests(msgspec.Struct, frozen=True):
    """The requests of a workload, in order of arrival or session by session.

    Arrival times are in units of the mean gap between requests. `uncached` is the share of prompt
    tokens that must be computed even if one cache without a size limit is used.
    """

    requests: tuple[TraceRequest, ...]
    uncached: float


def generate(workload: Workload, arrivals: int, most_tokens: int) -> Requests:
    """Generate the requests of a random workload: arrivals, prompts and lengths of answers.

    arrivals     random seed of the arrival times
    most_tokens  length of the longest allowed prompt
    """
    rng = Random(f"zoo {workload.seed} {workload.number} {arrivals}")
    prompts = _Prompts(workload, rng, most_tokens)
    if workload.sharing == "sessions":
        requests = list(_sessions(workload, rng, prompts))
    else:
        requests = []
        for at in _arrival_times(workload, rng):
            tokens, blocks = prompts.draw()
            requests.append(TraceRequest(at, tokens, _answer(workload, rng), blocks))
    return Requests(tuple(requests), _uncached_share(requests))


def _arrival_times(workload: Workload, rng: Random) -> list[float]:
    count, kind, spread = workload.requests, workload.arrivals, workload.spread
    if kind == "gamma":
        shape = 1.0 / spread**2
        gaps = [rng.gammavariate(shape, 1.0 / shape) for _ in range(count)]
        times = list(accumulate(gaps))
        return [at * count / times[-1] for at in times]
    even = list(accumulate(rng.expovariate(1.0) for _ in range(count)))
    if kind == "diurnal":
        waves = rng.choice((1.0, 2.0))
        return _warp(even, count, lambda at: 1.0 + spread * sin(2 * pi * waves * at))
    if kind == "spikes":
        starts = [rng.uniform(0.2, 0.93) for _ in range(rng.randint(2, 5))]
        width = rng.uniform(0.02, 0.05)

        def height(at: float) -> float:
            return spread if any(start <= at < start + width for start in starts) else 1.0

        return _warp(even, count, height)
    return even


def _warp(even: Sequence[float], count: int, density: Callable[[float], float]) -> list[float]:
    # Move uniformly distributed arrivals so that their rate follows `density` over [0, 1].
    cells = 400
    mass = [0.0, *accumulate(density((cell + 0.5) / cells) for cell in range(cells))]
    warped = []
    for at in even:
        place = min(at / even[-1], 1.0) * mass[-1]
        cell = min(cells - 1, max(0, bisect_left(mass, place) - 1))
        inside = (place - mass[cell]) / (mass[cell + 1] - mass[cell])
        warped.append(count * (cell + inside) / cells)
    return warped


def _answer(workload: Workload, rng: Random) -> int:
    mean, sigma = workload.answer_tokens, workload.answer_sigma
    if workload.answers == "tail" and rng.random() > LONG_SHARE:
        mean, sigma = 20.0, 0.6
    length = rng.lognormvariate(log(mean) - sigma * sigma / 2, sigma)
    return max(SHORTEST_ANSWER, min(LONGEST_ANSWER, round(length)))


class _Prompts:
    def __init__(self, workload: Workload, rng: Random, most_tokens: int) -> None:
        self._workload, self._rng = workload, rng
        self._most = min(LONGEST_PROMPT, most_tokens)
        self._next_private = PRIVATE
        self._shared: dict[tuple[int, ...], int] = {}
        self._popular = _zipf(workload.shared_count, workload.skew)
        self._branches = _zipf(TREE_BRANCHES, workload.skew)
        self._lengths: dict[tuple[int, ...], int] = {}

    def draw(self) -> tuple[int, tuple[int, ...]]:
        shared = self.shared_blocks()
        return self.extend(shared, self.own_tokens(), len(shared) * BLOCK_TOKENS)

    def own_tokens(self) -> int:
        workload = self._workload
        length = self._rng.lognormvariate(log(workload.prompt_median), workload.prompt_sigma)
        return max(SHORTEST_PROMPT, round(length))

    def extend(
        self, blocks: tuple[int, ...], more: int, tokens: int
    ) -> tuple[int, tuple[int, ...]]:
        # Extend a prompt of `tokens` tokens in `blocks` by `more` tokens in unshared blocks.
        #
        # Returns its new length and block ids, limited to the longest allowed prompt.
        total = min(self._most, tokens + more)
        kept = blocks[: min(tokens, total) // BLOCK_TOKENS]
        added = max(0, -(-total // BLOCK_TOKENS) - len(kept))
        first = self._next_private
        self._next_private += added
        return total, (*kept, *range(first, first + added))

    def shared_blocks(self) -> tuple[int, ...]:
        # Return the block ids of a random shared prefix; empty if the workload shares none.
        sharing, rng = self._workload.sharing, self._rng
        if sharing == "none":
            return ()
        if sharing == "sessions":
            return self._node((0,))
        root = bisect_left(self._popular, rng.random())
        if sharing == "system":
            return self._node((root,))
        if sharing == "documents":
            return (*self._node((-1,)), *self._node((root,)))
        path: tuple[int, ...] = (root,)
        blocks = self._node(path)
        for _ in range(rng.randrange(TREE_DEPTH)):
            path = (*path, bisect_left(self._branches, rng.random()))
            blocks += self._node(path)
        return blocks

    def _node(self, path: tuple[int, ...]) -> tuple[int, ...]:
        # Return the block ids of one node of the prefix tree.
        #
        # The length of the node is chosen at the first call.
        length = self._lengths.get(path)
        if length is None:
            mean = self._workload.shared_tokens / (BLOCK_TOKENS * (2 if len(path) > 1 else 1))
            length = max(1, round(mean * self._rng.uniform(0.5, 1.5)))
            self._lengths[path] = length
        ids = self._shared
        return tuple(ids.setdefault((*path, -2, index), len(ids)) for index in range(length))


def _zipf(count: int, skew: float) -> list[float]:
    weights = [1.0 / rank**skew for rank in range(1, count + 1)]
    total = sum(weights)
    cumulative = [*accumulate(weight / total for weight in weights)]
    cumulative[-1] = 1.0
    return cumulative


def _sessions(workload: Workload, rng: Random, prompts: _Prompts) -> Iterator[TraceRequest]:
    # Yield the requests of sessions: prompts that grow by answer and tool result each turn.
    #
    # Pauses are relative to their median. It yields twice the requests of a replay, because some
    # sessions do not end within it.
    made = number = 0
    while made < 2 * workload.requests:
        turns = max(2, min(60, round(rng.expovariate(1.0 / workload.shared_count))))
        blocks = prompts.shared_blocks()
        tokens, blocks = prompts.extend(blocks, prompts.own_tokens(), len(blocks) * BLOCK_TOKENS)
        for turn in range(turns):
            answer = _answer(workload, rng)
            pause = rng.lognormvariate(0.0, 1.0) if turn else None
            yield TraceRequest(0.0, tokens, answer, blocks, session=f"s{number}", think_s=pause)
            tool = round(rng.lognormvariate(log(workload.prompt_median / 4 + 60), 0.8))
            tokens, blocks = prompts.extend(blocks, answer + tool, tokens)
        made, number = made + turns, number + 1


def _uncached_share(requests: Sequence[TraceRequest]) -> float:
    known: set[int] = set()
    total = fresh = 0
    for request in requests:
        total += request.input_tokens
        new = [block for block in request.blocks if block not in known]
        known.update(new)
        fresh += min(request.input_tokens, len(new) * BLOCK_TOKENS)
    return fresh / total
