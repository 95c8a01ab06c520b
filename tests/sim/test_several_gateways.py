"""Tests of two simulated gateways: cache hits by the delay of messages between them.

Each gateway knows which prompts and loads it sent to the four engines. It receives the other's
decisions after a delay, by the functions that real gateways use. There is no network and no
process; `make gateways` tests those.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from random import Random

import msgspec
import pytest

from mockgpu.scheduler import Job
from planner.replay import FleetSpec, ReplayOptions, traffic
from planner.replay.fleet_sim import Fleet
from planner.replay.gateway_sim import INDEX_BYTES
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.results import figures
from policies import policy_registry
from policies.load_ledger import own_load, set_peer_load
from policies.prefix.fingerprint import Fingerprint
from policies.prefix.prefix_index import PrefixIndex
from policies.routing_types import Candidate, Pick, RoutingQuery
from tests.sim.conversation import conversation
from tests.sim.test_policies_on_a_virtual_clock import GROUP

REQUESTS = 500
SEEDS = range(2)
JITTER_S = 0.02
"""Random delay of each arrival in seconds, as in a network.

Routing amplifies the order of arrivals, so that results are means over several runs.
"""


class Known:
    def __init__(self, name: bytes, groups: list[ReplayGroup]) -> None:
        self.name = name
        self.index = PrefixIndex(INDEX_BYTES)
        self.candidates = tuple(
            Candidate(group.candidate.endpoint, deepcopy(group.load)) for group in groups
        )
        self.untold: list[tuple[Fingerprint, int, int]] = []
        for group in groups:
            self.index.set_capacity(group.load.slot, group.kind.capacity_tokens)

    def learn(self, fingerprint: Fingerprint, slot: int, prompt_tokens: int) -> None:
        load = self.candidates[slot].load
        self.index.insert(fingerprint, slot, prompt_tokens)
        load.prefix_cache_tokens, load.eviction_regret = (
            self.index.cached_tokens(slot),
            self.index.eviction_regret(slot),
        )


class Gateways(Fleet):
    """A simulation in which requests arrive at several gateways in turn.

    late_s  delay of messages between the gateways in seconds; None: there are no messages
    """

    def __init__(self, count: int, late_s: float | None, seed: int) -> None:
        arrivals, rng = conversation(REQUESTS), Random(seed)
        for index, arrival in enumerate(arrivals):
            arrivals[index] = msgspec.structs.replace(
                arrival, arrival_s=arrival.arrival_s + JITTER_S * rng.random()
            )
        options = ReplayOptions(expected_output=None, scrape_s=None)
        policy = policy_registry.build("prefix_aware", {})
        super().__init__(FleetSpec("several", (GROUP,)), traffic(arrivals), policy, None, options)
        self._known = [Known(bytes([index]), self.groups) for index in range(count)]
        self._turn(self._known[0])
        if late_s is not None:
            for known in self._known:
                self.schedule(late_s * rng.random(), self._tell, (known, late_s))

    def serve(self, now: float, flight: InflightRequest, ask: RoutingQuery) -> None:
        known = self._known[flight.record.number % len(self._known)]
        self._turn(known)
        super().serve(now, flight, self.gateway.query(flight, now))

    def send(
        self, now: float, flight: InflightRequest, group: ReplayGroup, pick: Pick, job: Job
    ) -> None:
        known = self._known[flight.record.number % len(self._known)]
        assert flight.fingerprint is not None
        known.untold.append(
            (flight.fingerprint, pick.candidate.load.slot, flight.request.prompt_tokens)
        )
        super().send(now, flight, group, pick, job)

    def _turn(self, known: Known) -> None:
        self.gateway.index, self.gateway.candidates = known.index, known.candidates
        for group, candidate in zip(self.groups, known.candidates, strict=True):
            group.load = candidate.load

    def _tell(self, now: float, what: tuple[Known, float]) -> None:
        known, late_s = what
        reports, known.untold = known.untold, []
        for other in self._known:
            if other is known:
                continue
            for fingerprint, slot, prompt_tokens in reports:
                other.learn(fingerprint, slot, prompt_tokens)
            for mine, theirs in zip(known.candidates, other.candidates, strict=True):
                set_peer_load(theirs.load, known.name, own_load(mine.load), now)
        if self.running_requests:
            self.schedule(now + late_s, self._tell, what)


@cache
def hit_ratio(count: int, late_s: float | None = None) -> float:
    return sum(figures(Gateways(count, late_s, seed).run()).hit_ratio for seed in SEEDS) / len(
        SEEDS
    )


@pytest.mark.parametrize("late_s", [0.1, 1.0])
def test_two_gateways_hit_like_one_despite_late_updates(late_s: float) -> None:
    assert hit_ratio(2, late_s) >= 0.97 * hit_ratio(1)


def test_two_unconnected_gateways_hit_much_less() -> None:
    assert hit_ratio(2) < 0.85 * hit_ratio(1)
