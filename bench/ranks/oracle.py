"""Chooses ranks (parts of an engine) with perfect knowledge of their state, as an upper limit.

A gateway cannot know all of this: the blocks in each cache, the prompt tokens that each rank still
has to compute, the lengths of the contexts that it decodes, its free KV memory, and which rank has
each session's context. Even the oracle does not know the lengths of answers or later requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mockgpu.scheduler import JobState
from mockgpu.timing.roofline import StepTimes, StepWork
from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS
from policies.policy_types import Policy, WeightedScorer
from policies.routing_types import Candidate, RoutingQuery

if TYPE_CHECKING:
    from planner.replay.fleet_sim import Fleet

SESSION_S = 60.0
"""Seconds since its last request after which a session no longer counts at its rank."""

CONTEXT_STEPS = 20
"""Number of decode steps that the context of a running request counts for in the work of a rank.

Every decode step reads the whole context. The value decides between ranks that are otherwise idle,
and changes little else.
"""


class PromptCosts:
    """The seconds that an engine needs to compute parts of a prompt, for the oracle's decisions.

    The values are measured on a model of the engine's step times.

    token_s        seconds per prompt token
    pair_s         seconds per pair of a query and a key (attention)
    context_s      seconds per context token that decoding reads
    has_attention  False to ignore attention, so that a prompt token costs the same at any position
    """

    def __init__(self, times: StepTimes, has_attention: bool = True) -> None:
        full, half = times.step_s(StepWork(8192)), times.step_s(StepWork(4096))
        self.token_s = (full - half) / 4096
        pairs_s = times.step_s(StepWork(8192, 1e8)) - full
        self.pair_s = pairs_s / 1e8 if has_attention else 0.0
        few, many = (times.step_s(StepWork(0, 0.0, 8, tokens)) for tokens in (1e5, 2e5))
        self.context_s = (many - few) / 1e5

    def prompt_s(self, start: float, tokens: float) -> float:
        """Return the seconds of prefill for `tokens` prompt tokens from position `start` on."""
        return tokens * (self.token_s + self.pair_s * (start + tokens / 2))


class Oracle:
    """Chooses the rank with the least prompt work before a new request, from the true state of all.

    All ranks of an engine step together and wait for the slowest one, so this rank also delays the
    other requests least. A new session should go to a rank with few sessions, because its later
    turns will follow.

    spread  how many seconds each session at a rank adds to its score for a new session, whose own
            prompt is then ignored; None: a new session is scored like any other request
    """

    def __init__(self, spread: float | None, costs: PromptCosts) -> None:
        self._spread, self._costs = spread, costs
        self._home: dict[str, tuple[int, float]] = {}
        self.fleet: Fleet | None = None

    def policy(self) -> Policy:
        return Policy(
            name="oracle",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(self._score),),
            picker=pickers.best,
            reads_prefix=True,
        )

    def _score(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        assert self.fleet is not None
        owed, read = self._pending()
        request, cached = query.request, query.cached_by_slot
        is_new = self._spread is not None and request.session not in self._home
        sessions = self._sessions(query.now) if is_new else Counter[int]()
        costs = []
        for candidate in candidates:
            slot = candidate.load.slot
            cost = owed[slot] + self._shortage_s(slot, query)
            cost += CONTEXT_STEPS * self._costs.context_s * read[slot]
            if is_new:
                cost += (self._spread or 0.0) * sessions[slot]
            else:
                cost += self._costs.prompt_s(cached[slot], request.prompt_tokens - cached[slot])
            costs.append(cost)
        best = candidates[costs.index(min(costs))].load.slot
        self._home[request.session] = best, query.now
        return [-cost for cost in costs]

    def _sessions(self, now: float) -> Counter[int]:
        return Counter(slot for slot, at_s in self._home.values() if now - at_s < SESSION_S)

    def _shortage_s(self, slot: int, query: RoutingQuery) -> float:
        # Return the cost of the tokens of KV that others must free before this request can start.
        assert self.fleet is not None
        group = self.fleet.groups[slot]
        request = query.request
        free = (1 - group.engine.metrics.kv_usage) * group.capacity_tokens
        needed = request.prompt_tokens + request.output_tokens - query.cached_by_slot[slot]
        return self._costs.token_s * max(0.0, needed - free)

    def _pending(self) -> tuple[list[float], list[float]]:
        # Return the seconds of prompts that each group still has to compute, and the tokens of
        # context that it decodes.
        assert self.fleet is not None
        count = len(self.fleet.groups)
        owed, read = [0.0] * count, [0.0] * count
        for job, flight in self.fleet.inflight.items():
            if flight.group is None:
                continue
            slot, known = flight.group.load.slot, job.computed
            if job.state is JobState.DECODE:
                read[slot] += job.known_tokens
                continue
            if job.state is JobState.WAITING:
                size = flight.group.block_tokens
                limit = (job.prompt_tokens - 1) // size
                known = flight.group.engine.count_hits(job.keys, limit) * size
            owed[slot] += self._costs.prompt_s(known, job.known_tokens - known)
        return owed, read
