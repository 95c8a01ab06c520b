"""One endpoint of a replayed fleet: its engine and ranks, its beliefs and load, its network link.

This module contains only state. fleet_sim.py and gateway_sim.py make decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Protocol

import msgspec

from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job
from mockgpu.timing.layout_times import rank_model
from planner.replay.engine_sim import JobEvents, ReplayEngine
from planner.replay.fleet_spec import FleetSpec, GroupKind
from planner.replay.ideal_pool import IdealPool
from planner.replay.lockstep_clock import StepClock
from planner.replay.rank_choice import HiddenRanks, RankChoice
from planner.replay.results import GroupTotals
from policies.endpoint_load import EndpointLoad, join_ranks
from policies.engine.output_length import RecentLengths
from policies.engine.step_time import NEUTRAL, SpeedBelief, StepCosts, shape_for
from policies.health.endpoint_speed import SpeedRecord
from policies.pricing.pull_decision import StoreTimes
from policies.routing_types import Candidate, Endpoint

UNCAPPED = 1 << 30


class JobListener(Protocol):
    """The methods that a simulated engine calls when one of its jobs (requests' work) advances.

    The class Fleet, which runs the replay, implements them.
    """

    def on_first_token(self, group: ReplayGroup, job: Job, now: float) -> None: ...

    def on_last_token(self, group: ReplayGroup, job: Job, now: float) -> None: ...

    def on_blocks_allocated(self, group: ReplayGroup, job: Job, now: float) -> None:
        """Record that KV memory was allocated for a job whose KV cache another engine sends."""
        ...


class ReplayGroup:
    """One endpoint of the fleet: an engine, or one data-parallel rank of an engine.

    Ranks in lockstep share a clock.

    clocks           the step clocks, one per rank of the endpoint
    capacity_tokens  tokens of KV that the endpoint can store, over all of its ranks
    rank             number of the data-parallel rank; None: the endpoint is a whole engine
    expected_keys    block ids of prompts that were sent to the endpoint and are not computed yet,
                     each with the number of such prompts
    sends_at_s       time at which its network link can send KV again
    receives_at_s    time at which its network link can receive KV again
    watched_s        time of the next event that is scheduled for the endpoint's engine
    """

    __slots__ = (
        *(
            "is_alive",
            "block_tokens",
            "candidate",
            "capacity_tokens",
            "clocks",
            "expected_keys",
            "engine",
            "_everywhere",
            "kind",
            "kv_token_bytes",
            "load",
            "name",
        ),
        *("listener", "receives_at_s", "sends_at_s", "speed", "totals", "watched_s"),
    )

    def __init__(
        self,
        slot: int,
        kind: GroupKind,
        clocks: Sequence[StepClock],
        block_tokens: int,
        listener: JobListener,
        has_caps: bool,
        lengths: RecentLengths,
        number: int,
        rank: int | None = None,
        everywhere: set[int] | None = None,
    ) -> None:
        # number   index of the engine
        # everywhere  keys of the blocks that all groups have (FleetSpec.ideal_cache); None: of none
        # lengths  learned lengths of answers, shared by all groups of the fleet
        self.name = f"tp{number}" if rank is None else f"tp{number}/dp{rank}"
        self.kind = kind
        self.block_tokens = block_tokens
        self.clocks = clocks
        self.listener = listener
        self.kv_token_bytes = kind.shape.kv_token_bytes
        self.load = EndpointLoad(slot, SpeedBelief(_prior(kind, len(clocks))), lengths)
        self.capacity_tokens = kind.capacity_tokens * len(clocks)
        self.load.kv_tokens = self.capacity_tokens
        if kind.labelled_num_seqs is not None:
            self.load.slots = kind.labelled_num_seqs * len(clocks)
        endpoint = _endpoint(self.name, number, kind, has_caps, rank)
        self.candidate = Candidate(endpoint, self.load)
        self.is_alive = kind.up_at_s <= 0
        self.load.is_available = self.is_alive
        self.expected_keys: Counter[int] = Counter()
        self.speed = SpeedRecord()
        self.watched_s = inf
        self.sends_at_s = self.receives_at_s = 0.0
        self.totals = GroupTotals(self.name)
        self._everywhere = everywhere
        self.engine = self.new_engine()

    @property
    def stored_tokens(self) -> tuple[int, int]:
        """Return how many tokens fit into the store of the group's host: in memory, and on disk."""
        kind, token_gb = self.kind, self.kv_token_bytes / 1e9
        return int(kind.store_gb / token_gb), int(kind.store_disk_gb / token_gb)

    @property
    def store_times(self) -> StoreTimes:
        """Return how long a fetch from the store of the group's host takes."""
        kind, token_gb = self.kind, self.kv_token_bytes / 1e9
        return StoreTimes(token_gb / kind.store_gb_s, token_gb / kind.store_disk_gb_s)

    @property
    def step_tokens(self) -> int:
        """Return the maximum number of prompt tokens in the group's current prefill step."""
        load, speed = self.load, self.speed
        others = load.in_flight - load.decoding - speed.waiting
        return speed.step_tokens(load.prefill_tokens, load.belief.shape.budget_tokens, others)

    def new_engine(self) -> ReplayEngine | HiddenRanks:
        if len(self.clocks) == 1:
            return self._new_rank(self.clocks[0])
        return HiddenRanks([self._new_rank(clock) for clock in self.clocks], self.kind.rank_choice)

    def _new_rank(self, clock: StepClock) -> ReplayEngine:
        engine = ReplayEngine(
            clock,
            self._new_pool(),
            self.kind.max_num_seqs,
            self.kind.step_budget,
            JobEvents(
                lambda job, now: self.listener.on_first_token(self, job, now),
                lambda job, now: self.listener.on_last_token(self, job, now),
                lambda job, now: self.listener.on_blocks_allocated(self, job, now),
            ),
        )
        engine.slow_prefill = engine.slow_decode = self.kind.slowness
        return engine

    def _new_pool(self) -> BlockPool:
        blocks = self.kind.capacity_tokens // self.block_tokens
        if self._everywhere is None:
            return BlockPool(blocks, self.block_tokens)
        return IdealPool(blocks, self.block_tokens, self._everywhere)

    def restart(self) -> None:
        """Replace the group's engine by a new one with an empty cache."""
        self.engine.stop()
        self.engine = self.new_engine()
        self.watched_s = inf

    def add_totals(self) -> None:
        """Add the engine's steps and busy seconds to the group's totals. Call once per engine."""
        self.totals.steps += self.engine.steps
        self.totals.busy_s += self.engine.busy_s

    def expect(self, keys: tuple[int, ...]) -> None:
        """Record that the engine will soon have these KV blocks cached: it got their prompt."""
        self.expected_keys.update(keys)

    def expect_no_more(self, keys: tuple[int, ...]) -> None:
        """Undo `expect`: the engine has computed these KV blocks, or will not compute them."""
        coming = self.expected_keys
        for key in keys:
            count = coming[key] - 1
            if count > 0:
                coming[key] = count
            else:
                del coming[key]

    def is_expected(self, keys: Sequence[int], first: int, last: int) -> bool:
        """Return whether a block between two of a prompt's blocks will soon be computed here."""
        return first < last and first < len(keys) and keys[first] in self.expected_keys

    def count_cached(self, keys: tuple[int, ...], limit: int) -> int:
        """Return how many of the first `limit` blocks the engine has cached or will have soon.

        keys  the ids of the prompt's blocks
        """
        engine, coming, matched = self.engine, self.expected_keys, 0
        while matched < limit:
            hits = engine.count_hits(keys[matched:limit], limit - matched)
            matched += hits
            matched_soon = matched
            while matched_soon < limit and keys[matched_soon] in coming:
                matched_soon += 1
            if matched_soon == matched:
                return matched
            matched = matched_soon
        return matched


def build_engines(
    spec: FleetSpec, listener: JobListener, merges_steps: bool, has_caps: bool
) -> list[list[ReplayGroup]]:
    """Build the engines of a fleet, as one group each, or one per rank if the gateway chooses
    ranks.

    merges_steps  False: every step is simulated separately
    has_caps      whether the gateway limits the requests in flight per group
    """
    times_of = {kind: kind.times() for kind in set(spec.groups)}
    engines: list[list[ReplayGroup]] = []
    lengths = RecentLengths()
    slot = 0
    everywhere = set[int]() if spec.ideal_cache else None
    for number, kind in enumerate(spec.groups):
        times, count = times_of[kind], kind.ranks
        clocks = (
            [StepClock(times, merges_steps)] * count
            if kind.is_lockstep
            else [StepClock(times, merges_steps) for _ in range(count)]
        )
        common = (spec.block_tokens, listener, has_caps, lengths, number)
        if count == 1 or kind.rank_choice is not RankChoice.GATEWAY:
            ranks = [ReplayGroup(slot, kind, clocks, *common, everywhere=everywhere)]
        else:
            ranks = [
                ReplayGroup(slot + rank, kind, clocks[rank : rank + 1], *common, rank, everywhere)
                for rank in range(count)
            ]
            if kind.shares_experts and kind.is_lockstep:
                join_ranks([rank.load for rank in ranks])
        engines.append(ranks)
        slot += len(ranks)
    return engines


def _prior(kind: GroupKind, ranks: int) -> StepCosts:
    # Return the gateway's estimate for a group, or for `ranks` data-parallel ranks of an engine.
    stated, split = kind.labelled_batched_tokens, kind.pp * kind.dp * ranks
    if not kind.knows_model:
        step_tokens = stated * split if stated else NEUTRAL.budget_tokens
        if not kind.labelled_gpu and kind.labelled_params_b is None:
            return msgspec.structs.replace(NEUTRAL, budget_tokens=step_tokens)
        params = kind.labelled_params_b, kind.labelled_active_b
        gpu = kind.labelled_gpu or None
        return shape_for(gpu, kind.tp, kind.pp, *params, budget_tokens=step_tokens)
    shape = kind.shape
    held = rank_model(shape, kind.layout) if kind.ranks > ranks else shape
    return shape_for(
        kind.labelled_gpu or kind.gpu,
        kind.tp * kind.dp * ranks,
        kind.pp,
        params_b=held.params / 1e9,
        active_b=held.active_params / 1e9,
        kv_token_bytes=shape.kv_token_bytes,
        weight_bytes=shape.weight_bytes,
        budget_tokens=(stated or kind.max_num_batched_tokens) * split,
    )


def _endpoint(
    name: str, number: int, kind: GroupKind, has_caps: bool, rank: int | None
) -> Endpoint:
    return Endpoint(
        name=name,
        url=f"http://127.0.0.1:{9000 + number}",
        pool="main",
        served_model=kind.model,
        role=kind.role,
        layout=kind.layout,
        max_concurrency=kind.max_concurrency if has_caps else UNCAPPED,
        rank=rank,
    )
