"""Simulates KV that engines of a replay fetch in place of computing it.

- Each engine saves the blocks of ended requests in the store of its host, as mockgpu/kv_store.py
  does. The engines' own rule (kvtransfer/store/fetch_rule.py) decides how much of a new prompt is
  fetched from there.
- An engine pulls the beginning of a prompt from another engine if the gateway says so
  (policies/pricing/pull_decision.py). The rest is computed by the engine that pulls.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.store.fetch_rule import FetchRule, PendingFetch, StoredPrefix
from kvtransfer.store.store_index import IN_MEMORY
from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job, JobState, Scheduler
from mockgpu.timing.roofline import StepWork
from planner.replay.fleet_spec import GroupKind
from planner.replay.group_sim import ReplayGroup
from planner.replay.host_store import HostStore
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_interfaces import FleetPort

_LEARNED_STEPS = 64, 512, 2048, 8192
"""Prompt tokens of the steps from which the fetch rule of an engine knows how fast it computes."""


class GroupStore:
    """The store of one engine's host, with the times at which its two copy engines are free.

    restores_at_s  time at which KV can be copied to the GPUs again
    saves_at_s     time at which KV can be copied from the GPUs again
    """

    __slots__ = ("restores_at_s", "rule", "saves_at_s", "store")

    def __init__(self, kind: GroupKind, block_tokens: int) -> None:
        block_bytes = block_tokens * kind.shape.kv_token_bytes
        self.store = HostStore(
            int(kind.store_gb * 1e9 / block_bytes), int(kind.store_disk_gb * 1e9 / block_bytes)
        )
        self.rule = FetchRule(block_tokens, kind.step_budget)
        times = kind.roofline()
        for tokens in _LEARNED_STEPS:
            area = tokens * tokens / 2
            self.rule.on_step(tokens, area, times.step_s(StepWork(tokens, area, 0, 0)))
        self.restores_at_s = self.saves_at_s = 0.0

    @staticmethod
    def disk_s(places: bytes, block_tokens: int, kind: GroupKind) -> float:
        """Return the seconds of reading those of some blocks from disk that are there alone."""
        on_disk = sum(not bits & IN_MEMORY for bits in places)
        block_bytes = block_tokens * kind.shape.kv_token_bytes
        return on_disk * block_bytes / (kind.store_disk_gb_s * 1e9)


class StoreSim:
    """The stores of all hosts of a replayed fleet, and pulls between its engines."""

    def __init__(self, fleet: FleetPort, block_tokens: int) -> None:
        self._fleet, self._size = fleet, block_tokens
        # Jobs whose KV the other engine computes first, by that engine.
        self._awaiting: dict[ReplayGroup, list[tuple[ReplayGroup, Job]]] = {}
        self._stores = {
            group: GroupStore(group.kind, block_tokens)
            for group in fleet.groups
            if group.kind.store_gb
        }

    def may_fetch(self, group: ReplayGroup, inflight: InflightRequest) -> bool:
        """Return whether an engine looks for a request's KV elsewhere before it computes it."""
        return inflight.pulled_from is not None or group in self._stores

    def has_more(self, group: ReplayGroup, job: Job, hits: int) -> bool:
        """Return whether a store or another engine has more of a prompt than its first blocks.

        A prompt of which nothing is stored must not wait a step, which would look like a slow
        engine.
        """
        at, inflight = self._stores.get(group), self._fleet.inflight.get(job)
        is_pulled = inflight is not None and inflight.pulled_from is not None
        keys = job.keys[hits : min(hits + 1, (job.prompt_tokens - 1) // self._size)]
        return is_pulled or (at is not None and bool(at.store.places(keys)))

    def watch(self, group: ReplayGroup) -> None:
        """Let an engine ask what is stored of its prompts. An engine that restarted is new."""
        _scheduler_of(group).has_stored = lambda job, hits: self.has_more(group, job, hits)

    def count_stored(self, group: ReplayGroup, keys: Sequence[int]) -> int:
        """Return how many leading blocks an engine can send: those that it or its host has."""
        pool, at = _pool_of(group), self._stores.get(group)
        hits = pool.count_hits(keys, len(keys))
        return hits + (len(at.store.places(keys[hits:])) if at is not None else 0)

    def fetch(self, group: ReplayGroup, job: Job, now: float) -> None:
        """Fetch the beginning of a prompt for which the engine has allocated blocks.

        It is pulled from another engine if the gateway has decided so and that engine still has
        more of it than this one's host. Otherwise, what this one's host has is fetched.
        """
        first, size = job.computed // self._size, self._size
        keys = job.keys[: (job.prompt_tokens - 1) // size]
        at, inflight = self._stores.get(group), self._fleet.inflight[job]
        places = at.store.places(keys[first:]) if at is not None else b""
        source = inflight.pulled_from
        if source is not None and source.is_alive:
            count = self.count_stored(source, keys)
            if source.is_expected(keys, count, (job.prompt_tokens - 1) // size):
                self._awaiting.setdefault(source, []).append((group, job))
                return
            if count - first > len(places):
                self._pull(now, group, job, source, count - first)
                return
        if at is None or not places:
            self._finish(now, (group, job, 0))
            return
        self._restore(now, group, job, at, places)

    def _restore(
        self, now: float, group: ReplayGroup, job: Job, at: GroupStore, places: bytes
    ) -> None:
        rule, scheduler = at.rule, group.engine.scheduler_of(job)
        busy_s = sum(
            rule.compute_s(other.computed, other.known_tokens)
            for other in (*scheduler.prefilling, *scheduler.fetched)
        )
        count = rule.choose(StoredPrefix(job.computed, job.prompt_tokens, places, busy_s), now)
        if not count:
            self._finish(now, (group, job, 0))
            return
        pending = rule.begin(places[:count], now)
        seconds = count * self._size * group.kv_token_bytes / (group.kind.store_gb_s * 1e9)
        seconds += at.disk_s(places[:count], self._size, group.kind)
        at.restores_at_s = max(now, at.restores_at_s) + seconds
        first = job.computed // self._size
        at.store.put(job.keys[: first + count])
        self._fleet.schedule(at.restores_at_s, self._on_restored, (group, job, at, pending))

    def _on_restored(
        self, now: float, event: tuple[ReplayGroup, Job, GroupStore, PendingFetch]
    ) -> None:
        group, job, at, pending = event
        at.rule.end(pending, now, is_complete=True)
        self._finish(now, (group, job, pending.blocks))

    def _pull(
        self, now: float, group: ReplayGroup, job: Job, source: ReplayGroup, count: int
    ) -> None:
        # The source's blocks stay allocated until they are sent; what its host has needs none.
        first, pool = job.computed // self._size, _pool_of(source)
        keys = job.keys[: first + count]
        hits = pool.count_hits(keys, len(keys))
        held = pool.acquire_cached(keys, hits)
        rate = min(source.kind.link_gb_s, group.kind.link_gb_s) * 1e9
        ready_s = now
        if (stored := self._stores.get(source)) is not None:
            ready_s += stored.disk_s(stored.store.places(keys[hits:]), self._size, source.kind)
            stored.store.put(keys)
        begins_s = max(ready_s, source.sends_at_s, group.receives_at_s)
        ends_s = begins_s + count * self._size * group.kv_token_bytes / rate
        source.sends_at_s = group.receives_at_s = ends_s
        self._fleet.schedule(ends_s, self._on_pulled, (source, pool, held, (group, job, count)))

    def _on_pulled(
        self,
        now: float,
        event: tuple[ReplayGroup, BlockPool, list[int], tuple[ReplayGroup, Job, int]],
    ) -> None:
        source, pool, held, pulled = event
        pool.release(held)
        if source.is_alive:
            self._fleet.wake(now, source)
        self._finish(now, pulled)

    def _finish(self, now: float, event: tuple[ReplayGroup, Job, int]) -> None:
        group, job, blocks = event
        if job.state is not JobState.FETCHING or job not in self._fleet.inflight:
            return  # withdrawn meanwhile
        group.engine.scheduler_of(job).on_restored(job, blocks)
        self._fleet.schedule(now, self._wake, group)

    def _wake(self, now: float, group: ReplayGroup) -> None:
        if group.is_alive:
            self._fleet.wake(now, group)

    def on_computed(self, now: float, source: ReplayGroup) -> None:
        """Continue pulls that waited until another prompt was computed at this engine."""
        for group, job in self._awaiting.pop(source, ()):
            if job.state is JobState.FETCHING and job in self._fleet.inflight:
                self.fetch(group, job, now)

    def save(self, now: float, group: ReplayGroup, job: Job) -> None:
        """Save the cached blocks of an ended request in the store of its engine's host.

        The blocks stay allocated until they are copied.
        """
        at = self._stores.get(group)
        if at is None:
            return
        pool, missing = _pool_of(group), 0
        count = pool.count_hits(job.keys, len(job.keys))
        keys = job.keys[:count]
        missing = count - len(at.store.places(keys))
        at.store.put(keys)
        if not missing:
            return
        held = pool.acquire_cached(keys, count)
        seconds = missing * self._size * group.kv_token_bytes / (group.kind.store_gb_s * 1e9)
        at.saves_at_s = max(now, at.saves_at_s) + seconds
        self._fleet.schedule(at.saves_at_s, self._on_saved, (group, pool, held))

    def _on_saved(self, now: float, event: tuple[ReplayGroup, BlockPool, list[int]]) -> None:
        group, pool, held = event
        pool.release(held)
        self._wake(now, group)


def _scheduler_of(group: ReplayGroup) -> Scheduler:
    scheduler: Scheduler = group.engine.scheduler  # type: ignore[union-attr]
    return scheduler


def _pool_of(group: ReplayGroup) -> BlockPool:
    return _scheduler_of(group).pool
