"""A TP group of the replayed fleet: its engine, the gateway's view of it, and its network link.

Contains state only; fleet.py and gateway_sim.py decide.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Protocol

from mockgpu.blocks import BlockPool
from mockgpu.job import Job
from mockgpu.roofline import StepTimes
from planner.replay.engine import ReplayEngine
from planner.replay.record import GroupTotals
from planner.replay.spec import GroupKind
from policies.engine.step_time import SpeedBelief, StepCosts, shape_for
from policies.health.speed_record import SpeedRecord
from policies.load import EndpointLoad
from policies.model import Candidate, Endpoint

UNCAPPED = 1 << 30


class JobListener(Protocol):
    """Protocol of the object that receives the events of jobs; the fleet implements it."""

    def on_first_token(self, group: ReplayGroup, job: Job, now: float) -> None: ...

    def on_last_token(self, group: ReplayGroup, job: Job, now: float) -> None: ...

    def on_blocks_allocated(self, group: ReplayGroup, job: Job, now: float) -> None:
        """Record that the blocks of a job are allocated, whose KV comes from another group."""
        ...


class ReplayGroup:
    """One TP group of the fleet.

    expected_keys            block ids of prompts it was sent and has not computed, with the number
                             of such prompts
    sends_at_s, receives_at_s  when its link is free again, in each direction
    watched_s                time of its engine's event on the heap
    """

    __slots__ = (
        *(
            "is_alive",
            "block_tokens",
            "candidate",
            "expected_keys",
            "engine",
            "kind",
            "kv_token_bytes",
            "leaping",
            "load",
            "name",
        ),
        *("listener", "receives_at_s", "roofline", "sends_at_s", "speed", "totals", "watched_s"),
    )

    def __init__(
        self,
        slot: int,
        kind: GroupKind,
        roofline: StepTimes,
        block_tokens: int,
        listener: JobListener,
        leaping: bool,
        capped: bool,
    ) -> None:
        self.name = f"tp{slot}"
        self.kind = kind
        self.block_tokens = block_tokens
        self.leaping = leaping
        self.roofline = roofline
        self.listener = listener
        self.kv_token_bytes = kind.shape.kv_token_bytes
        self.load = EndpointLoad(slot, SpeedBelief(_prior(kind)))
        self.load.kv_tokens = kind.capacity_tokens
        self.candidate = Candidate(_endpoint(self.name, slot, kind, capped), self.load)
        self.is_alive = kind.up_at_s <= 0
        self.load.is_available = self.is_alive
        self.expected_keys: Counter[int] = Counter()
        self.speed = SpeedRecord()
        self.watched_s = inf
        self.sends_at_s = self.receives_at_s = 0.0
        self.totals = GroupTotals(self.name)
        self.engine = self.new_engine()

    @property
    def step_tokens(self) -> int:
        """Most prompt tokens that the group's current prefill step may have to compute."""
        load, speed = self.load, self.speed
        others = load.in_flight - load.decoding - speed.waiting
        return speed.step_tokens(load.prefill_tokens, load.belief.shape.budget_tokens, others)

    def new_engine(self) -> ReplayEngine:
        engine = ReplayEngine(
            self.roofline,
            BlockPool(self.kind.capacity_tokens // self.block_tokens, self.block_tokens),
            self.kind.max_num_seqs,
            self.kind.step_budget,
            lambda job, now: self.listener.on_first_token(self, job, now),
            lambda job, now: self.listener.on_last_token(self, job, now),
            lambda job, now: self.listener.on_blocks_allocated(self, job, now),
            self.leaping,
        )
        engine.slow_prefill = engine.slow_decode = self.kind.slowness
        return engine

    def restart(self) -> None:
        """Replace the engine by a new one with an empty cache."""
        self.engine = self.new_engine()
        self.watched_s = inf

    def add_totals(self) -> None:
        """Add the counters of the group's engine to the group's totals.

        Call this once per engine.
        """
        self.totals.steps += self.engine.steps
        self.totals.busy_s += self.engine.busy_s

    def expect(self, keys: tuple[int, ...]) -> None:
        """Count KV blocks that the group will soon have computed and cached."""
        self.expected_keys.update(keys)

    def expect_no_more(self, keys: tuple[int, ...]) -> None:
        """Undo `expect` for KV blocks that the group has now computed, or will not compute."""
        coming = self.expected_keys
        for key in keys:
            count = coming[key] - 1
            if count > 0:
                coming[key] = count
            else:
                del coming[key]

    def count_cached(self, keys: tuple[int, ...], limit: int) -> int:
        """Return how many of the first `limit` block ids the group has cached or will compute
        soon.
        """
        pool, coming, matched = self.engine.scheduler.pool, self.expected_keys, 0
        while matched < limit:
            hits = pool.count_hits(keys[matched:limit], limit - matched)
            matched += hits
            matched_soon = matched
            while matched_soon < limit and keys[matched_soon] in coming:
                matched_soon += 1
            if matched_soon == matched:
                return matched
            matched = matched_soon
        return matched


def _prior(kind: GroupKind) -> StepCosts:
    shape = kind.shape
    return shape_for(
        kind.labelled_gpu or kind.gpu,
        kind.tp * kind.dp,
        kind.pp,
        params_b=shape.params / 1e9,
        active_b=shape.active_params / 1e9,
        kv_token_bytes=shape.kv_token_bytes,
        weight_bytes=shape.weight_bytes,
        budget_tokens=kind.labelled_batched_tokens or kind.step_budget,
    )


def _endpoint(name: str, slot: int, kind: GroupKind, capped: bool) -> Endpoint:
    return Endpoint(
        name=name,
        url=f"http://127.0.0.1:{9000 + slot}",
        pool="main",
        served_model=kind.model,
        role=kind.role,
        layout=kind.layout,
        max_concurrency=kind.max_concurrency if capped else UNCAPPED,
    )
