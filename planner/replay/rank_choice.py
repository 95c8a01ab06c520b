"""Simulates engines that choose the data-parallel rank of each request themselves.

The gateway sees only one endpoint. Engines choose by counts of requests as vLLM does, or in turn as
SGLang does by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import chain

from mockgpu.rank_balancer import RankBalancer
from mockgpu.scheduler import Job, Scheduler
from planner.replay.engine_sim import EngineMetrics, ReplayEngine


class RankChoice(StrEnum):
    """How the data-parallel rank for a request is chosen: by the gateway, or by the engine."""

    GATEWAY = "gateway"  # each rank is an endpoint
    LEAST = "least"  # the engine chooses the rank with the fewest requests, as vLLM does
    TURNS = "turns"  # the engine uses its ranks in turn, as SGLang does


class HiddenRanks:
    """An engine with several data-parallel ranks behind one endpoint.

    It has the interface of ReplayEngine.
    """

    def __init__(self, ranks: Sequence[ReplayEngine], choice: RankChoice) -> None:
        self.ranks = ranks
        self._balancer = RankBalancer(len(ranks)) if choice is RankChoice.LEAST else None
        self._turn = -1
        self._rank_of: dict[Job, ReplayEngine] = {}
        self._clocks = list(dict.fromkeys(rank.clock for rank in ranks))

    @property
    def due_s(self) -> float:
        """Return when the first of the ranks' current steps ends; inf: all ranks are idle."""
        return min(clock.due_s for clock in self._clocks)

    @property
    def steps(self) -> int:
        return max(rank.steps for rank in self.ranks)

    @property
    def busy_s(self) -> float:
        return max(rank.busy_s for rank in self.ranks)

    @property
    def slow_prefill(self) -> float:
        """Return the factor on the duration of steps with prompt tokens; 1: normal speed."""
        return self.ranks[0].slow_prefill

    @slow_prefill.setter
    def slow_prefill(self, factor: float) -> None:
        for rank in self.ranks:
            rank.slow_prefill = factor

    @property
    def slow_decode(self) -> float:
        """Return the factor on the duration of steps without prompt tokens; 1: normal speed."""
        return self.ranks[0].slow_decode

    @slow_decode.setter
    def slow_decode(self, factor: float) -> None:
        for rank in self.ranks:
            rank.slow_decode = factor

    @property
    def largest_blocks(self) -> int:
        """Return the largest number of KV blocks that one request may use, on the smallest rank."""
        return min(rank.largest_blocks for rank in self.ranks)

    @property
    def decoding(self) -> Iterable[Job]:
        return chain.from_iterable(rank.decoding for rank in self.ranks)

    @property
    def metrics(self) -> EngineMetrics:
        """Return the engine's metrics as the gateway reads them: total requests, mean KV usage."""
        pages = [rank.metrics for rank in self.ranks]
        return EngineMetrics(
            sum(page.running for page in pages),
            sum(page.waiting for page in pages),
            sum(page.kv_usage for page in pages) / len(pages),
        )

    def count_hits(self, keys: Sequence[int], limit: int) -> int:
        """Return the number of cached blocks, as a mean over the ranks (any may be chosen)."""
        return sum(rank.count_hits(keys, limit) for rank in self.ranks) // len(self.ranks)

    def scheduler_of(self, job: Job) -> Scheduler:
        """Return the scheduler of the rank that has this job."""
        return self._rank_of[job].scheduler

    def add(self, job: Job, now: float) -> None:
        """Choose a data-parallel rank, and add a job to its queue."""
        self._rank_of[job] = rank = self.ranks[self._choose(now)]
        rank.add(job, now)

    def _choose(self, now: float) -> int:
        if self._balancer is not None:
            return self._balancer.pick(now, self._counts)
        self._turn = (self._turn + 1) % len(self.ranks)
        return self._turn

    def _counts(self) -> list[tuple[int, int]]:
        return [(page.waiting, page.running) for page in (rank.metrics for rank in self.ranks)]

    def wake(self, now: float) -> None:
        """Let all idle ranks read their queues at the time `now`, because a job was added."""
        for clock in self._clocks:
            clock.wake(now)

    def advance(self, now: float) -> None:
        """Finish the ranks' steps that are due, report their results, and begin the next steps."""
        for clock in self._clocks:
            if clock.due_s == now:
                clock.advance(now)

    def holds(self, job: Job) -> bool:
        """Return whether the job runs on one of the ranks or is in a queue."""
        return job in self._rank_of and self._rank_of[job].holds(job)

    def abort(self, job: Job, now: float) -> None:
        """Remove a job from its rank at once."""
        self._rank_of.pop(job).abort(job, now)

    def generated_tokens(self, now: float) -> dict[Job, int]:
        """Return the number of tokens generated by `now`, for each decoding job."""
        generated: dict[Job, int] = {}
        for rank in self.ranks:
            generated |= rank.generated_tokens(now)
        return generated

    def stop(self) -> None:
        """Stop the engine, which has failed. Its current work is lost."""
        for rank in self.ranks:
            rank.stop()

    def longest_gap_s(self, job: Job, since_s: float) -> float:
        """Return the longest time between two tokens of a finished job, in seconds.

        `since_s` is the time of its first token.
        """
        return self._rank_of.pop(job).longest_gap_s(job, since_s)
