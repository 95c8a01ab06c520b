"""Tests that a vLLM worker reports each of its KV transfers once, also a cancelled one.

The connections are simulated.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvtransfer.agent import Agent
from kvtransfer.engines.vllm.connector_counters import PendingCounts, add_counts
from kvtransfer.engines.vllm.handoff_params import WorkerAddress
from kvtransfer.engines.vllm.handoff_scheduler import (
    HandoffScheduler,
    LoadOrder,
    PromptRequest,
    StepOrders,
)
from kvtransfer.engines.vllm.handoff_worker import FinishedTransfers, TransferWorker
from kvtransfer.engines.vllm.prefill_parts import OfferOrder
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transports.inproc import Inproc, InprocWire
from kvtransfer.util.clock import VirtualClock

KEY = b"k" * 32
LAYOUT = KvLayout(
    2, kv_heads=2, head_dim=8, dtype=KvDtype.FP32, block_tokens=4,
    order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=9,
)  # fmt: skip
PROMPT = list(range(11))


class Engine:
    def __init__(self, name: str, wire: InprocWire, clock: VirtualClock) -> None:
        way = Inproc(wire)
        size = LAYOUT.rank_block_bytes(0)
        self.memory = bytearray(9 * size)
        region = Region.over(self.memory, size, name=name)
        self.agent = Agent(name, LAYOUT, [region], key=KEY, transports=[way], clock=way.agent_clock)
        self.agent.open()
        self.worker = TransferWorker(self.agent, LAYOUT, 0, timeout_s=5.0)
        self.scheduler = HandoffScheduler(
            KEY, name, "f", lease_s=30.0, clock=clock.now, warn=lambda _: None
        )
        address = WorkerAddress(self.agent.address + ":0", name, self.agent.epoch)
        self.scheduler.set_workers([address], LAYOUT)

    def step(self) -> FinishedTransfers:
        orders = self.scheduler.take_orders(False)
        self.worker.prepare(orders)
        self.worker.execute(orders)
        done = self.worker.take_finished()
        self.scheduler.on_ended(list(done.sent), list(done.received))
        return done


@pytest.fixture
def pair() -> tuple[VirtualClock, Engine, Engine]:
    clock = VirtualClock()
    wire = InprocWire(clock)
    return clock, Engine("p", wire, clock), Engine("d", wire, clock)


def finished(clock: VirtualClock, engine: Engine, what: str) -> Callable[[], bool]:
    seen = FinishedTransfers()

    def done() -> bool:
        step = engine.step()
        seen.sent |= step.sent
        seen.received |= step.received
        seen.failed |= step.failed
        return bool(getattr(seen, what))

    return done


def handed_over(p: Engine, d: Engine) -> PromptRequest:
    params = p.scheduler.finish_prefill(PromptRequest("p1", PROMPT, {}), [1, 2, 3], 11)
    p.step()
    request = PromptRequest("d1", PROMPT, params)
    assert d.scheduler.loadable_tokens(request, 0) == 11
    return request


def without_port(order: LoadOrder) -> LoadOrder:
    return replace(
        order, sources=[replace(item, address=item.address[:-2]) for item in order.sources]
    )


def test_kv_moves_from_worker_to_worker_and_each_end_is_reported_once(
    pair: tuple[VirtualClock, Engine, Engine],
) -> None:
    clock, p, d = pair
    p.memory[:] = b"\x07" * len(p.memory)
    handed_over(p, d)
    d.scheduler.begin_load("d1", [4, 5, 6], 11)
    orders = d.scheduler.take_orders(False)
    orders.loads = [without_port(order) for order in orders.loads]
    d.worker.execute(orders)
    assert clock.run(5, finished(clock, d, "received"))
    assert clock.run(5, finished(clock, p, "sent"))
    assert sum(d.memory) == 7 * len(d.memory) * 3 // 9
    assert d.worker.is_idle
    assert p.worker.is_idle
    assert not p.scheduler.has_pending_work
    assert not d.scheduler.has_pending_work
    assert d.step() == p.step() == FinishedTransfers()
    received = d.worker.counts.take()
    assert received.pop("kv_receive_seconds") >= 0.0
    assert received == {"kv_ranks_received": 1, "kv_received_bytes": len(d.memory) * 3 // 9}
    assert p.worker.counts.take() == {"kv_ranks_sent": 1}


def test_a_load_that_fails_is_reported_as_failed_behind_its_fence(
    pair: tuple[VirtualClock, Engine, Engine],
) -> None:
    clock, p, d = pair
    handed_over(p, d)
    d.scheduler.begin_load("d1", [4, 5, 6], 11)
    orders = d.scheduler.take_orders(False)
    (load,) = (without_port(order) for order in orders.loads)
    wrong = [replace(load.sources[0], ticket="forged")]
    d.worker.execute(StepOrders(loads=[replace(load, sources=wrong)]))
    seen = FinishedTransfers()
    assert clock.run(5, lambda: bool(seen.failed or _merge(seen, d.worker.take_finished())))
    assert (seen.received, seen.failed) == ({"d1"}, {"d1"})
    assert d.worker.counts.take()["kv_ranks_not_received"] == 1


def _merge(into: FinishedTransfers, more: FinishedTransfers) -> bool:
    into.received |= more.received
    into.failed |= more.failed
    return bool(into.failed)


def test_blocks_that_cannot_hold_the_tokens_fail_the_load_alone(
    pair: tuple[VirtualClock, Engine, Engine],
) -> None:
    _, p, d = pair
    handed_over(p, d)
    d.scheduler.begin_load("d1", [4], 11)
    done = d.step()
    assert (done.received, done.failed) == ({"d1"}, {"d1"})
    assert d.worker.is_idle


def test_an_aborted_load_ends_and_frees_both_ends(
    pair: tuple[VirtualClock, Engine, Engine],
) -> None:
    clock, p, d = pair
    handed_over(p, d)
    d.scheduler.begin_load("d1", [4, 5, 6], 11)
    orders = d.scheduler.take_orders(False)
    orders.loads = [without_port(order) for order in orders.loads]
    d.worker.execute(orders)
    d.scheduler.forget("d1")
    assert clock.run(5, finished(clock, d, "received"))
    assert clock.run(5, finished(clock, p, "sent"))


def test_an_unused_handoff_frees_the_source_long_before_its_lease(
    pair: tuple[VirtualClock, Engine, Engine],
) -> None:
    clock, p, d = pair
    handed_over(p, d)
    d.scheduler.begin_load("d1", [4, 5, 6], 0)
    orders = d.scheduler.take_orders(False)
    d.worker.execute(StepOrders(unused=[without_port(order) for order in orders.unused]))
    assert clock.run(2, finished(clock, p, "sent"))


def test_a_step_carries_out_several_offers(pair: tuple[VirtualClock, Engine, Engine]) -> None:
    _, p, _ = pair
    offers = [OfferOrder(f"r{i}", f"r{i}/x", [i], 4, 1.0, [bytes([i]) * 16]) for i in range(3)]
    p.worker.prepare(StepOrders(offers=offers))
    assert not p.worker.is_idle
    assert p.agent.stats()["leases"]["offered"] == 3


def test_reports_add_up_and_an_unknown_counter_is_refused() -> None:
    assert add_counts({"kv_ranks_sent": 1}, {"kv_ranks_sent": 2, "kv_received_bytes": 5}) == {
        "kv_ranks_sent": 3,
        "kv_received_bytes": 5,
    }
    with pytest.raises(KeyError):
        PendingCounts().add("kv_unknown")
