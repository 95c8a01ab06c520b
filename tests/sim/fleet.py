"""A fleet of TP groups on a virtual clock under one policy: the real policies, fingerprints, index and scheduler.

What the gateway's EndpointTable does with sockets is done here with events on a heap. Nothing waits, nothing sleeps.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean

from mockgpu.blocks import BlockPool
from mockgpu.roofline import Roofline
from mockgpu.scheduler import Job, Plan, Scheduler
from policies import ledger
from policies.contract import Policy
from policies.fingerprint import Fingerprint, Fingerprinter
from policies.latency import Belief, Shape
from policies.ledger import Entry
from policies.model import Ask, Candidate, Endpoint, EndpointLoad, Request
from policies.prefix_index import PrefixIndex
from policies.run import pick

BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 4
EXPECTED_OUTPUT = 350
TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_1500.jsonl.gz"


@dataclass(slots=True)
class Arrival:
    """One request of a trace. `blocks` are chained ids of its 512-token blocks, the ragged last one included."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]

    def text(self) -> bytes:
        """Prompt bytes that agree where the block ids agree."""
        whole = b"".join(Random(block).randbytes(BLOCK_TOKENS * BYTES_PER_TOKEN) for block in self.blocks)
        return whole[: self.prompt_tokens * BYTES_PER_TOKEN]


@dataclass(slots=True)
class Served:
    """What became of one request. `picked` is the group's index; `place` tells what was predicted for it."""

    arrival: Arrival
    picked: int
    believed_tokens: int
    job: Job
    place: Entry
    ttft_s: float = -1.0
    tpot_s: float | None = None


@dataclass(slots=True)
class Group:
    """One TP group and the gateway's view of it."""

    scheduler: Scheduler
    roofline: Roofline
    candidate: Candidate
    plan: Plan | None = None
    jobs: dict[int, Served] = field(default_factory=dict)
    served_tokens: int = 0

    @property
    def load(self) -> EndpointLoad:
        return self.candidate.load


@dataclass(slots=True)
class Report:
    served: list[Served]
    groups: list[Group]

    @property
    def mean_ttft_s(self) -> float:
        return fmean(one.ttft_s for one in self.served)

    @property
    def worst_ttft_s(self) -> float:
        return max(one.ttft_s for one in self.served)

    @property
    def hit_ratio(self) -> float:
        return sum(one.job.cached for one in self.served) / sum(one.arrival.prompt_tokens for one in self.served)

    @property
    def imbalance(self) -> float:
        """Tokens served by the busiest group over those of the idlest."""
        tokens = [group.served_tokens for group in self.groups]
        return max(tokens) / max(1, min(tokens))


def mooncake(speed: float = 1.0, seed: int = 1) -> list[Arrival]:
    """The excerpt, each 3 s batch spread over its 3 s, time sped up by `speed`."""
    rng = Random(seed)
    rows = [json.loads(line) for line in gzip.decompress(TRACE.read_bytes()).splitlines()]
    arrivals = [
        Arrival(
            (row["timestamp"] / 1000 + rng.uniform(0, 3)) / speed,
            row["input_length"],
            row["output_length"],
            row["hash_ids"],
        )
        for row in rows
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def shared_cache_hit_ratio(arrivals: Iterable[Arrival], capacity_tokens: int) -> float:
    """Hit ratio of one LRU cache with that much memory seeing every request."""
    cache: dict[int, None] = {}
    hits = total = 0
    for arrival in arrivals:
        blocks = arrival.blocks[: arrival.prompt_tokens // BLOCK_TOKENS]
        known = 0
        while known < min(len(blocks), (arrival.prompt_tokens - 1) // BLOCK_TOKENS) and blocks[known] in cache:
            known += 1
        hits += known * BLOCK_TOKENS
        total += arrival.prompt_tokens
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) * BLOCK_TOKENS > capacity_tokens:
            del cache[next(iter(cache))]
    return hits / total


@dataclass(slots=True)
class Kind:
    """What a TP group is: its true step times, its memory, and what is believed of it at first (None: neutral)."""

    roofline: Roofline
    kv_tokens: int
    prior: Shape | None = None


class Fleet:
    """TP groups behind one policy, one for each of `kinds`. `run()` replays arrivals to the last token.

    told: whether the policy knows each request's true output length, or only an average.
    """

    def __init__(self, policy: Policy, kinds: Sequence[Kind], seed: int = 7, told: bool = False) -> None:
        self.policy, self.told = policy, told
        self.rng = Random(seed)
        self.groups = [self._group(slot, kind) for slot, kind in enumerate(kinds)]
        self.candidates = [group.candidate for group in self.groups]
        self.fingerprinter = Fingerprinter(b"a secret of the simulation")
        self.index = PrefixIndex(64 << 20)
        for slot, kind in enumerate(kinds):
            self.index.set_capacity(slot, kind.kv_tokens)
        self.served: list[Served] = []
        self._events: list[tuple[float, int, Arrival | Group]] = []
        self._order = count()

    def _group(self, slot: int, kind: Kind) -> Group:
        endpoint = Endpoint(f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "pool", "model", max_concurrency=10_000)
        scheduler = Scheduler(BlockPool(kind.kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS))
        load = EndpointLoad(slot, None if kind.prior is None else Belief(kind.prior))
        load.kv_tokens = kind.kv_tokens
        return Group(scheduler, kind.roofline, Candidate(endpoint, load))

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        for arrival in arrivals:
            heapq.heappush(self._events, (arrival.at_s, next(self._order), arrival))
        while self._events:
            now, _, what = heapq.heappop(self._events)
            if isinstance(what, Group):
                self._finish(what, now)
            else:
                self._arrive(what, now)
        return Report(self.served, self.groups)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        fingerprint, cached = None, []
        if self.policy.reads_prefix:
            fingerprint = self.fingerprinter.of(b"salt", arrival.text())
            cached = self.index.match(fingerprint, arrival.prompt_tokens)
        output_tokens = arrival.output_tokens if self.told else EXPECTED_OUTPUT
        request = Request("id", "model", "tenant", arrival.prompt_tokens, output_tokens)
        chosen = pick(self.policy, Ask(request, now, self.rng, cached), self.candidates)
        assert chosen is not None
        group = self.groups[chosen.candidate.load.slot]
        self._book(group, arrival, request, chosen.cached_tokens, fingerprint, now)
        if group.plan is None:
            self._start(group, now)

    def _book(
        self,
        group: Group,
        arrival: Arrival,
        request: Request,
        believed: int,
        fingerprint: Fingerprint | None,
        now: float,
    ) -> None:
        job = Job(arrival.prompt_tokens, arrival.output_tokens, arrival.blocks[: arrival.prompt_tokens // BLOCK_TOKENS])
        one = Served(arrival, group.load.slot, believed, job, ledger.book(group.load, request, believed, now))
        group.scheduler.add(job)
        group.jobs[id(job)] = one
        group.served_tokens += arrival.prompt_tokens + arrival.output_tokens
        self.served.append(one)
        if fingerprint is not None:
            self.index.insert(fingerprint, group.load.slot, arrival.prompt_tokens)

    def _start(self, group: Group, now: float) -> None:
        group.plan = group.scheduler.step()
        if group.plan is not None:
            heapq.heappush(self._events, (now + group.roofline.step_s(group.plan.work), next(self._order), group))

    def _finish(self, group: Group, now: float) -> None:
        assert group.plan is not None
        outcome = group.scheduler.finish(group.plan)
        for job in outcome.began:
            self._first_token(group, group.jobs[id(job)], now)
        for job in outcome.ended:
            one = group.jobs.pop(id(job))
            one.place.finished(now, job.output_tokens)
            if job.output_tokens > 1:
                one.tpot_s = (now - one.arrival.at_s - one.ttft_s) / (job.output_tokens - 1)
        self._start(group, now)

    def _first_token(self, group: Group, one: Served, now: float) -> None:
        if one.ttft_s >= 0:
            return
        one.ttft_s = now - one.arrival.at_s
        one.place.first_token(now)
        prompt = one.arrival.prompt_tokens
        self.index.confirm(group.load.slot, one.believed_tokens / prompt, one.job.cached / prompt)
