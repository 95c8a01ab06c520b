"""Tests of KV transfer agents in simulated time: bandwidth, priorities, leases and heartbeats.

Times are exact to the millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvtransfer.agent import Agent
from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.transfer.handles import TransferHandle
from kvtransfer.transports.inproc import Inproc, InprocWire, WireConditions
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import VirtualClock

LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=32, dtype=KvDtype.BF16, block_tokens=16)
BLOCKS = 200
BLOCK_BYTES = LAYOUT.rank_block_bytes(0)


class World:
    def __init__(
        self,
        weather: WireConditions | None = None,
        count: int = 2,
        options: AgentOptions | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.wire = InprocWire(self.clock, weather or WireConditions(latency_s=0.001))
        self.agents: list[Agent] = []
        self.regions: list[Region] = []
        for number in range(count):
            end = Inproc(self.wire)
            region = Region.over(
                np.zeros(BLOCKS * BLOCK_BYTES, np.uint8), BLOCK_BYTES, name=f"a{number}"
            )
            agent = Agent(
                f"a{number}",
                LAYOUT,
                [region],
                key=b"k" * 32,
                transports=[end],
                clock=end.agent_clock,
                options=options,
            )
            agent.open()
            self.agents.append(agent)
            self.regions.append(region)

    def until_ended(self, handles: Sequence[TransferHandle], within_s: float) -> bool:
        return self.clock.run(within_s, lambda: all(handle.outcome for handle in handles))


def tokens(blocks: Sequence[int]) -> int:
    return len(blocks) * LAYOUT.block_tokens


def test_a_transfer_takes_the_time_that_the_bandwidth_allows() -> None:
    world = World(WireConditions(latency_s=0.002, bytes_per_s=100e6))
    source, sink = world.agents
    offer = source.offer("r", range(100), tokens(range(100)), public=True)
    landing = sink.fetch(
        source.address, "r", range(100, 200), tokens(range(100)), ticket=offer.ticket
    )
    assert world.until_ended([landing, offer], 60)
    assert landing.outcome is not None
    assert landing.outcome.has_landed
    wire_s = 100 * BLOCK_BYTES / 100e6
    # Beyond the wire's own time: dialling, three messages of greeting, the invitation, and the last
    # window's latency.
    assert wire_s < landing.outcome.seconds < wire_s + 8 * 0.002 + 0.005
    assert source.stats()["bytes_per_s"]["a1", "inproc"] == pytest.approx(100e6, rel=0.1)


def test_a_small_urgent_transfer_overtakes_a_large_one() -> None:
    world = World(
        WireConditions(latency_s=0.0005, bytes_per_s=50e6),
        options=AgentOptions(window_bytes=256 << 10, budget_bytes=1 << 20),
    )
    source, sink = world.agents
    big = source.offer("big", range(90), tokens(range(90)), public=True)
    bulk = sink.fetch(source.address, "big", range(90), tokens(range(90)), priority="bulk")
    world.clock.run(0.05)
    small = source.offer("small", [199], 16, public=True)
    urgent = sink.fetch(source.address, "small", [199], 16)
    began = world.clock.now()
    assert world.until_ended([urgent], 10)
    # One budget's worth was under way already; nothing else is waited for.
    assert world.clock.now() - began < (1 << 20) / 50e6 + BLOCK_BYTES / 50e6 + 0.01
    assert bulk.outcome is None
    assert world.until_ended([bulk, big, small], 60)
    assert bulk.outcome.has_landed  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_layers_sent_while_prefill_computes_cost_little_time_after_it(share: float) -> None:
    # The transfer takes `share` of the prefill's time.
    #
    # After the prefill only one group of layers is left to send.
    blocks, prefill_s = range(BLOCKS // 2), 1.0
    moved_s = share * prefill_s
    world = World(WireConditions(latency_s=0.0005, bytes_per_s=len(blocks) * BLOCK_BYTES / moved_s))
    source, sink = world.agents
    offer = source.offer("r", blocks, tokens(blocks), ready_layers=0, public=True)
    landing = sink.fetch(source.address, "r", range(100, 200), tokens(blocks))
    for layer in range(1, LAYOUT.layers + 1):
        world.clock.call_at(
            prefill_s * layer / LAYOUT.layers, lambda layer=layer: offer.mark_ready(layer)
        )  # type: ignore[misc]
    assert world.until_ended([landing, offer], 10)
    exposed_s = world.clock.now() - prefill_s
    assert landing.outcome.has_landed  # type: ignore[union-attr]
    groups = landing.outcome.n_bytes / (6 << 20)  # type: ignore[union-attr]
    assert exposed_s < moved_s * (1 / groups + 0.15 if share == 1.0 else 0.25)


def test_a_live_sink_keeps_its_lease_and_a_disconnected_one_loses_it() -> None:
    world = World()
    source, sink = world.agents
    offer = source.offer("r", [0], 16, ttl_s=0.6, ready_layers=0, public=True)
    landing = sink.fetch(source.address, "r", [1], 16, timeout_s=100)
    world.clock.run(20)
    assert offer.outcome is None
    world.wire.stall(sink.address)
    before = world.clock.now()
    assert world.until_ended([offer, landing], 5)
    assert world.clock.now() - before < 1.0
    assert {offer.outcome.reason, landing.outcome.reason} <= {
        EndReason.SILENT,
        EndReason.LEASE_EXPIRED,
        EndReason.LINK_LOST,
    }  # type: ignore[union-attr]


@pytest.mark.parametrize("frozen", [0, 1], ids=["source", "sink"])
def test_a_frozen_peer_is_detected_within_a_second(frozen: int) -> None:
    for phase in range(25):
        world = World()
        source, sink = world.agents
        offer = source.offer("r", [0], 16, ready_layers=0, public=True)
        landing = sink.fetch(source.address, "r", [1], 16)
        world.clock.run(1 + phase / 100)
        world.wire.freeze(world.agents[frozen].address)
        left: TransferHandle = landing if frozen == 0 else offer
        before = world.clock.now()
        assert world.until_ended([left], 5)
        assert 0.5 < world.clock.now() - before <= 0.9
        assert left.outcome.reason is EndReason.SILENT  # type: ignore[union-attr]
        world.wire.thaw(world.agents[frozen].address)
        assert world.until_ended([offer, landing], 5)


def test_half_a_second_of_silence_ends_no_link() -> None:
    world = World()
    source, sink = world.agents
    offer = source.offer("r", [0], 16, ready_layers=0, public=True)
    landing = sink.fetch(source.address, "r", [1], 16)
    for _ in range(10):
        world.clock.run(1)
        world.wire.freeze(source.address)
        world.clock.run(0.45)
        world.wire.thaw(source.address)
    offer.mark_ready(LAYOUT.layers)
    assert world.until_ended([offer, landing], 5)
    assert landing.outcome.has_landed  # type: ignore[union-attr]


@pytest.mark.parametrize("who", ["sink", "source"])
def test_a_client_that_leaves_frees_both_sides_within_a_round_trip(who: str) -> None:
    for moment in (0.0005, 0.002, 0.004, 0.006, 0.02, 0.2):
        world = World(WireConditions(latency_s=0.001, bytes_per_s=30e6))
        source, sink = world.agents
        offer = source.offer("r", range(100), tokens(range(100)), public=True)
        landing = sink.fetch(
            source.address, "r", range(100, 200), tokens(range(100)), ticket=offer.ticket
        )
        world.clock.run(moment)
        (landing.cancel if who == "sink" else offer.revoke)()
        before = world.clock.now()
        if who == "sink" and moment < 0.005:
            offer.revoke()  # not claimed yet: no other agent can release it
        assert world.until_ended([offer, landing], 5)
        assert world.clock.now() - before < 0.05


def test_a_killed_sink_releases_a_hundred_offers_at_once() -> None:
    world = World(count=3)
    source, sink, other = world.agents
    offers = [
        source.offer(f"r{number}", [number], 16, ready_layers=0, public=True)
        for number in range(100)
    ]
    for number in range(100):
        sink.fetch(source.address, f"r{number}", [number], 16)
    elsewhere = source.offer("elsewhere", [150], 16, ready_layers=0, public=True)
    landing = other.fetch(source.address, "elsewhere", [150], 16)
    world.clock.run(0.1)
    world.wire.kill(sink.address)
    assert world.until_ended(offers, 1)
    assert {offer.outcome.reason for offer in offers if offer.outcome} == {EndReason.LINK_LOST}
    assert (world.regions[0].generations[:100] == 1).all()
    elsewhere.mark_ready(LAYOUT.layers)
    assert world.until_ended([elsewhere, landing], 1)
    assert landing.outcome.has_landed  # type: ignore[union-attr]


def test_equal_seeds_give_equal_runs() -> None:
    def story() -> list[object]:
        world = World(
            WireConditions(
                latency_s=0.001,
                bytes_per_s=20e6,
                corrupt=0.05,
                delay=0.3,
                delay_s=0.01,
                duplicate=0.1,
            )
        )
        source, sink = world.agents
        ends = []
        for number in range(20):
            offer = source.offer(f"r{number}", range(10), 160, public=True)
            landing = sink.fetch(
                source.address, f"r{number}", range(10, 20), 160, ticket=offer.ticket
            )
            world.until_ended([offer, landing], 10)
            ends += [
                msgspec.structs.replace(handle.outcome, detail="")
                for handle in (offer, landing)
                if handle.outcome
            ]
        return ends

    assert story() == story()


def test_when_most_transfers_abort_the_others_land_sooner_and_nothing_is_held() -> None:
    world = World(WireConditions(latency_s=0.0005, bytes_per_s=40e6))
    source, sink = world.agents
    offers = [
        source.offer(f"r{index}", [index], 16, ready_layers=0, public=True) for index in range(100)
    ]
    landings = [sink.fetch(source.address, f"r{index}", [index], 16) for index in range(100)]
    world.clock.run(0.1)
    for offer in offers:
        offer.mark_ready(LAYOUT.layers)
    world.clock.run(0.02)
    began = world.clock.now()
    for index, landing in enumerate(landings):
        if index % 10:
            landing.cancel("the client left")
    assert world.until_ended([*offers, *landings], 30)
    ends = [landing.outcome.reason for landing in landings if landing.outcome]
    assert all(ends[index] is EndReason.LANDED for index in range(0, 100, 10))
    assert ends.count(EndReason.CANCELLED) >= 80
    # Ten blocks, and the budget that was under way when the storm began.
    assert world.clock.now() - began < (10 * BLOCK_BYTES + sink.options.budget_bytes) / 40e6 + 0.05
    for agent in (source, sink):
        figures = agent.stats()
        assert not any(figures["leases"].values())
        assert not any(figures["reservations"].values())
        assert not figures["under_way_bytes"]
