"""Simulates one way to choose a rank for each request, on the traffic of one random seed.

A rank is one of the data-parallel parts of an engine. The work of each rank is recorded.
"""

from __future__ import annotations

from time import process_time

import msgspec

from bench.ranks.oracle import Oracle, PromptCosts
from bench.ranks.sessions import draw, sessions
from mockgpu.scheduler import Job
from planner.replay import CacheView, FleetSpec, GroupKind, ReplayOptions, Traffic, users
from planner.replay.engine_sim import ReplayEngine
from planner.replay.fleet_sim import Fleet
from planner.replay.group_sim import ReplayGroup
from planner.replay.rank_choice import HiddenRanks, RankChoice
from planner.replay.results import figures
from policies import policy_registry
from policies.routing_types import Slo

RANKS = 8
AGENT = Slo("agent", 10.0, 0.1)
HORIZON_S, COLD_S = 420.0, 150.0
RAMP_S = 60.0
SESSIONS = 600
DECODE_WEIGHT = 0.02
"""Work of one token of decoded context, in prompt tokens, when the work of ranks is compared.

It is small, so that it decides only between ranks with about equally many prompt tokens.
"""

ARMS = {
    "vllm": (RankChoice.LEAST, "prefix_aware"),
    "turns": (RankChoice.TURNS, "prefix_aware"),
    "prefix_aware": (RankChoice.GATEWAY, "prefix_aware"),
    "priced": (RankChoice.GATEWAY, "priced"),
    "least_loaded": (RankChoice.GATEWAY, "least_loaded"),
}
"""The compared ways to choose a rank, by name.

A value says which component chooses, and the gateway's policy. Further names stand for oracles,
which know the true state of every rank:

oracle      spreads no sessions: a new session is a request like any other
oracle:0.1  spreads sessions: each one at a rank counts as 0.1 s of work when a new one comes
tokens      as oracle, but all prompt tokens cost the same at any position
tokens:0.1  as oracle:0.1, with the same change
"""


class Measurement(msgspec.Struct, frozen=True):
    """How well one rule to choose data-parallel ranks ("arm") served users, for one random seed.

    goodput         requests per second that met their latency budgets
    attainment      share of the requests that met their latency budgets
    to_most_loaded  share of the uncached prompt tokens that went to the rank that had the most work
                    when they were sent; an even choice gives 1 / RANKS
    """

    arm: str
    seed: int
    users: int
    goodput: float
    attainment: float
    hit_ratio: float
    to_most_loaded: float
    ttft_p50_s: float
    tpot_p50_s: float
    offered: int
    cpu_s: float


class ObservedFleet(Fleet):
    """A simulated fleet that counts new prompt tokens, and those that went to the busiest rank."""

    new_tokens = 0.0
    to_most_loaded = 0.0

    def enter(self, now: float, what: tuple[ReplayGroup, Job]) -> None:
        job = what[1]
        if job not in self.inflight:
            return
        ranks = self._ranks()
        work = [_work(rank) for rank in ranks]
        super().enter(now, what)
        scheduler = what[0].engine.scheduler_of(job)
        (chosen,) = (place for place, rank in enumerate(ranks) if rank.scheduler is scheduler)
        size = scheduler.pool.block_tokens
        hits = scheduler.pool.count_hits(job.keys, (job.prompt_tokens - 1) // size)
        tokens = job.prompt_tokens - hits * size
        self.new_tokens += tokens
        # If several ranks have the most work, count only the share of the chosen one.
        most = max(work)
        if work[chosen] == most:
            self.to_most_loaded += tokens / work.count(most)

    def _ranks(self) -> list[ReplayEngine]:
        ranks: list[ReplayEngine] = []
        for group in self.groups:
            engine = group.engine
            ranks += engine.ranks if isinstance(engine, HiddenRanks) else [engine]
        return ranks


def _work(rank: ReplayEngine) -> float:
    # Return the prompt tokens that a rank still has to compute, and a part of its context.
    scheduler = rank.scheduler
    size = scheduler.pool.block_tokens
    owed = sum(job.known_tokens - job.computed for job in scheduler.prefilling)
    for job in scheduler.waiting:
        hits = scheduler.pool.count_hits(job.keys, (job.prompt_tokens - 1) // size)
        owed += job.known_tokens - hits * size
    return owed + DECODE_WEIGHT * sum(job.known_tokens for job in scheduler.decoding)


def measure(arm: str, seed: int, count: int) -> Measurement:
    """Simulate `count` users on one engine of 8 ranks, with the sessions of this random seed."""
    began = process_time()
    workload = draw(seed)
    choice, _ = ARMS.get(arm, (RankChoice.GATEWAY, ""))
    kind = GroupKind(
        *("deepseek-v3", "h200", 1),
        ep=RANKS,
        ranks=RANKS,
        ep_skew=workload.skew,
        rank_choice=choice,
    )
    options = ReplayOptions(
        seed=seed,
        learns_lengths=True,
        standard=AGENT,
        horizon_s=HORIZON_S,
        view=CacheView.INDEX if arm in ARMS else CacheView.EXACT,
    )
    traffic = users(sessions(workload, seed, SESSIONS), count, seed, RAMP_S)
    fleet = _fleet(arm, FleetSpec("ranks", (kind,)), traffic, options)
    found = figures(fleet.run(), COLD_S, HORIZON_S)
    return Measurement(
        arm=arm,
        seed=seed,
        users=count,
        goodput=found.goodput,
        attainment=found.attainment,
        hit_ratio=found.hit_ratio,
        to_most_loaded=fleet.to_most_loaded / max(1.0, fleet.new_tokens),
        ttft_p50_s=found.ttft.p50 if found.ttft else 0.0,
        tpot_p50_s=found.tpot.p50 if found.tpot else 0.0,
        offered=found.offered,
        cpu_s=process_time() - began,
    )


def _fleet(arm: str, spec: FleetSpec, traffic: Traffic, options: ReplayOptions) -> ObservedFleet:
    if arm in ARMS:
        return ObservedFleet(spec, traffic, policy_registry.build(ARMS[arm][1], {}), None, options)
    costs = PromptCosts(spec.kinds[0].roofline(), has_attention=not arm.startswith("tokens"))
    _, _, spread = arm.partition(":")
    oracle = Oracle(float(spread) if spread else None, costs)
    fleet = ObservedFleet(spec, traffic, oracle.policy(), None, options)
    oracle.fleet = fleet
    return fleet
