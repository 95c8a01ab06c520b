"""Property tests of the endpoint table over configuration changes, as a state machine.

Two endpoints never share a slot of the table, and reserved capacity survives a change.
"""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.config import Config
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.fleet.reservation import Reservation
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from policies.routing_types import Pick, Request

URLS = [f"http://127.0.0.1:{9000 + number}" for number in range(5)]


def config(pools: dict[str, list[int]], cap: int) -> Config:
    specs = {
        name: {"endpoints": [{"url": URLS[n], "max_concurrency": cap} for n in numbers]}
        for name, numbers in pools.items()
        if numbers
    }
    models = [{"name": name, "pool": name} for name in specs]
    return Config.model_validate({"version": 1, "models": models, "pools": specs})


class Table(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.metrics = Metrics()
        self.current = config({"a": [0, 1]}, 4)
        outbox = WriteQueue(self.loop)
        self.table = EndpointTable(
            self.current, PrefixCacheView(bytes(32), 1 << 20, 256), self.metrics, Random(1), outbox
        )
        self.adoption = self.table.plan(self.current)
        self.table.apply(self.adoption)
        self.open: list[tuple[LiveEndpoint, Reservation]] = []

    def teardown(self) -> None:
        for _, reservation in self.open:
            reservation.__exit__()
        assert all(live.load.in_flight == 0 for live in self.table.all())
        self.loop.close()

    @rule(
        places=st.lists(st.sampled_from(["a", "b", "-"]), min_size=5, max_size=5),
        cap=st.integers(1, 9),
    )
    def adopt(self, places: list[str], cap: int) -> None:
        pools = {
            name: [n for n, place in enumerate(places) if place == name] for name in ("a", "b")
        }
        if not any(pools.values()):
            return
        self.current = config(pools, cap)
        before = {(live.endpoint.pool, live.endpoint.url): live for live in self.table.all()}
        self.adoption = self.table.plan(self.current)
        unchanged = {(live.endpoint.pool, live.endpoint.url): live for live in self.table.all()}
        assert unchanged == before, "planning changes nothing"
        moves = self.table.apply(self.adoption)
        for member in self.adoption.members:
            key = member.endpoint.pool, member.endpoint.url
            assert before.get(key, member.live) is member.live, "a known endpoint keeps its object"
        assert not {id(live) for live in moves.added} & {id(live) for live in moves.removed}

    @rule(number=st.integers(0, 99))
    def reserve(self, number: int) -> None:
        candidates = [member for members in self.adoption.pools.values() for member in members]
        chosen = candidates[number % len(candidates)]
        pick = Pick(chosen, 0, 0.0, 1, "test")
        live = next(live for live in self.table.all() if live.load is chosen.load)
        self.open.append((live, self.table.reserve(pick, Request("id", "m", "", 10, 5), None)))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        _, reservation = self.open.pop(number % len(self.open))
        reservation.__exit__()

    @rule()
    def release_the_idle(self) -> None:
        for live in self.table.all():
            if live.is_leaving and not live.load.in_flight:
                self.table.release(live)

    @invariant()
    def every_endpoint_has_its_own_slot(self) -> None:
        slots = [live.load.slot for live in self.table.all()]
        assert len(slots) == len(set(slots))
        assert max(slots) < 10, "two pools of five: slots are reused"

    @invariant()
    def in_flight_counts_the_reservations_of_each_endpoint(self) -> None:
        for live in self.table.all():
            assert live.load.in_flight == sum(owner is live for owner, _ in self.open)

    @invariant()
    def exactly_the_configured_endpoints_stay(self) -> None:
        configured = {
            (pool, endpoint.url)
            for pool, spec in self.current.pools.items()
            for endpoint in spec.endpoints
        }
        staying = {
            (live.endpoint.pool, live.endpoint.url)
            for live in self.table.all()
            if not live.is_leaving
        }
        assert staying == configured
        for pool, members in self.adoption.pools.items():
            cap = self.current.pools[pool].endpoints[0].max_concurrency
            assert all(member.endpoint.max_concurrency == cap for member in members)
            assert any(member.load.is_available for member in members)


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
