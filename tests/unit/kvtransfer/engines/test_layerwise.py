"""Tests of KV that is sent layer by layer while a prompt is computed.

The engines are simulated, in simulated time.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvtransfer.agent import Agent
from kvtransfer.engines.vllm.handoff_params import WorkerAddress
from kvtransfer.engines.vllm.handoff_scheduler import (
    CARD,
    TRANSFER,
    HandoffScheduler,
    PromptRequest,
    StepOrders,
)
from kvtransfer.engines.vllm.handoff_worker import TransferWorker
from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transports.inproc import Inproc, InprocWire, WireConditions
from kvtransfer.util.clock import VirtualClock

KEY = b"k" * 32
LAYERS, BLOCK_TOKENS, LAYER_S = 16, 16, 0.010
# 6 MiB of one layer are a group of their own: 512 tokens of 12 KiB.
DEEP = KvLayout(
    LAYERS, kv_heads=12, head_dim=128, dtype=KvDtype.FP32, block_tokens=BLOCK_TOKENS,
    order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=34,
)  # fmt: skip
SMALL = KvLayout(
    4, kv_heads=2, head_dim=8, dtype=KvDtype.FP32, block_tokens=4,
    order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=24,
)  # fmt: skip


class Engine:
    # A mock engine of one rank: it computes prompts step by step and layer by layer.

    def __init__(
        self,
        name: str,
        layout: KvLayout,
        wire: InprocWire,
        clock: VirtualClock,
        *,
        part_tokens: int = 512,
        layerwise: bool = True,
        window: int = 0,
    ) -> None:
        way, self.layout, self.clock = Inproc(wire), layout, clock
        size = layout.rank_block_bytes(0)
        self.memory = np.zeros(layout.blocks * size, np.uint8)
        # Layers are outermost: a row of the array is one block of one layer.
        self.rows = self.memory.reshape(layout.layers, layout.blocks, -1)
        region = Region.over(self.memory, size, name=name)
        self.agent = Agent(name, layout, [region], key=KEY, transports=[way], clock=way.agent_clock)
        self.agent.open()
        self.worker = TransferWorker(self.agent, layout, 0, timeout_s=60.0)
        self.scheduler = HandoffScheduler(
            KEY, name, "f", lease_s=30.0, clock=clock.now, warn=lambda _: None,
            part_tokens=part_tokens, layerwise=layerwise, window=window,
        )  # fmt: skip
        address = WorkerAddress(self.agent.address, name, self.agent.epoch)
        self.scheduler.set_workers([address], layout)
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()

    def begin(self) -> StepOrders:
        orders = self.scheduler.take_orders(False)
        self.worker.prepare(orders)
        return orders

    def finish(self, orders: StepOrders) -> None:
        self.worker.finish_step()
        self.worker.execute(orders)
        done = self.worker.take_finished()
        self.scheduler.on_ended(list(done.sent), list(done.received))
        self.sent |= done.sent
        self.received |= done.received
        self.failed |= done.failed

    def step(self) -> bool:
        self.finish(self.begin())
        return bool(self.received)

    @property
    def card(self) -> object:
        return self.scheduler._card


def prompt_of(seed: int, tokens: int) -> list[int]:
    return [Random(seed).randrange(1000) for _ in range(tokens)]


def legs(p: Engine, seed: int, tokens: int) -> tuple[PromptRequest, PromptRequest]:
    prompt, transfer = prompt_of(seed, tokens), f"t{seed}"
    take = {"do_remote_prefill": True, TRANSFER: transfer, CARD: p.card}
    give = {"do_remote_decode": True, TRANSFER: transfer}
    return PromptRequest(f"p{seed}", prompt, give), PromptRequest(f"d{seed}", prompt, take)


def reserve(d: Engine, request: PromptRequest, blocks: list[int], cached: int = 0) -> int:
    count = d.scheduler.loadable_tokens(request, cached)
    d.scheduler.begin_load(request.id, blocks, count)
    d.step()
    return count


def compute_deep(p: Engine, d: Engine, give: PromptRequest) -> tuple[float, float, float]:
    # Compute a prompt of 512 tokens at P. Returns the times of the first layer's arrival, of the
    # last layer's computation, and of the end of the transfer.
    blocks, first = list(range(32)), 0.0
    p.scheduler.begin_prefill(give)
    p.scheduler.on_step([PromptChunk(give.id, 0, len(give.prompt))], lambda _: blocks)
    orders = p.begin()
    (landing,) = d.worker._landings[give.id.replace("p", "d")]
    for layer in range(LAYERS):
        p.clock.run(LAYER_S)
        first = first or (p.clock.now() if landing.layers else 0.0)
        p.rows[layer, :32] = layer + 1
        p.worker.mark_computed(layer)
    computed = p.clock.now()
    p.finish(orders)
    end = p.scheduler.end_prefill(give.id, blocks, len(give.prompt), is_whole=True)
    assert end is not None
    assert end[0]
    assert p.clock.run(60, lambda: p.step() or d.step())
    return first, computed, p.clock.now()


def exposed(layerwise: bool, bytes_per_s: float) -> tuple[float, float, float]:
    # Return the times of `compute_deep`, relative to the computation of the last layer, after
    # checking that every byte has arrived.
    clock = VirtualClock()
    wire = InprocWire(clock, WireConditions(bytes_per_s=bytes_per_s))
    p = Engine("p", DEEP, wire, clock, layerwise=layerwise)
    d = Engine("d", DEEP, wire, clock)
    # The first handoff links the agents.
    d.agent.fetch(p.agent.address, "none", [0], 1, timeout_s=0.1)
    clock.run(1.0)
    give, take = legs(p, 1, 512)
    assert reserve(d, take, list(range(2, 34))) == 512
    first, computed, landed = compute_deep(p, d, give)
    assert d.received == {"d1"}
    assert not d.failed
    assert (d.rows[:, 2:34] == np.arange(1, LAYERS + 1)[:, None, None]).all()
    assert clock.run(5, lambda: p.step() or "p1" in p.sent)
    return first, computed, landed - computed


@pytest.mark.parametrize("share", [0.25, 0.9, 1.2])
def test_layers_move_while_later_layers_are_computed(share: float) -> None:
    # `share` is the transfer's duration relative to the computation's.
    n_bytes = DEEP.rank_block_bytes(0) * 32
    speed = n_bytes / (LAYERS * LAYER_S * share)
    first, computed, overlapped = exposed(True, speed)
    assert 0.0 < first < computed
    _, _, afterwards = exposed(False, speed)
    assert afterwards >= LAYERS * LAYER_S * share
    assert overlapped <= 0.5 * afterwards


class Trial:
    # Random prompts, chunks, preemptions, aborts and ends of both engines.

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.clock = VirtualClock()
        wire = InprocWire(self.clock, WireConditions(latency_s=0.001, bytes_per_s=2e6), self.rng)
        self.p = Engine("p", SMALL, wire, self.clock, part_tokens=8)
        self.d = Engine("d", SMALL, wire, self.clock)
        self.count = 0

    def run_request(self) -> tuple[str, str]:
        # Run a request at both engines. Returns how it ended at each: done, aborted, preempted.
        rng, p, d = self.rng, self.p, self.d
        self.count += 1
        tokens = rng.randrange(1, 48)
        give, take = legs(p, self.count, tokens)
        self.targets = rng.sample(range(24), -(-tokens // 4))
        d.rows[:, self.targets] = 0
        self.cached, self.tokens = rng.choice((0, 0, tokens // 4 // 2 * 4)), tokens
        # The decode engine comes before the prefill, after it, or never.
        arrival = rng.choices(("first", "last", "never"), (7, 2, 1))[0]
        if arrival == "first":
            reserve(d, take, self.targets, self.cached)
        p.scheduler.begin_prefill(give)
        end = self._compute(give)
        if end == "aborted":
            p.step()
            assert p.agent.stats()["leases"]["offered"] == 0
        if arrival == "last":
            reserve(d, take, self.targets, self.cached)
        decode_end = arrival if arrival == "never" else "done"
        if rng.random() < 0.15:
            self.clock.run(rng.uniform(0.0, 0.01))
            d.scheduler.forget(take.id)
            decode_end = "aborted"
        assert self.clock.run(120, lambda: self._is_over(give.id, take.id))
        return end, decode_end

    def _is_over(self, prefill: str, decode: str) -> bool:
        self.p.step()
        self.d.step()
        return prefill not in self.p.scheduler._sending and decode not in self.d.scheduler._loading

    def _compute(self, give: PromptRequest) -> str:
        # Compute a prompt in steps, and end its request. Returns how it ended.
        end, sources = self._compute_steps(give)
        self.p.scheduler.end_prefill(give.id, sources, len(give.prompt), is_whole=end != "aborted")
        return end

    def _compute_steps(self, give: PromptRequest) -> tuple[str, list[int]]:
        rng, p, tokens, end = self.rng, self.p, len(give.prompt), "done"
        sources, computed = rng.sample(range(24), -(-tokens // 4)), 0
        while computed < tokens:
            count = min(rng.randrange(1, 20), tokens - computed)
            if computed and rng.random() < 0.1:
                # Another request's KV is written into the blocks, and the prompt begins again.
                p.scheduler.on_step([], lambda _: [])
                orders = p.begin()
                p.rows[:, sources] = 255
                p.finish(orders)
                sources = rng.sample(range(24), len(sources))
                computed, end = 0, "preempted"
                continue
            if rng.random() < 0.05:
                return "aborted", sources
            self._compute_step(give.id, sources, computed, count)
            computed += count
            self.d.step()
        return end, sources

    def _compute_step(self, request: str, sources: list[int], computed: int, count: int) -> None:
        p, blocks = self.p, sources[: -(-(computed + count) // 4)]
        p.scheduler.on_step([PromptChunk(request, computed, count)], lambda _: blocks)
        orders = p.begin()
        for layer in range(SMALL.layers):
            p.rows[layer, blocks[computed // 4 :]] = self.count
            p.worker.mark_computed(layer)
            self.clock.run(self.rng.choice((0.0, 0.002)))
        p.finish(orders)


@pytest.mark.parametrize("seed", range(30))
def test_kv_that_landed_is_right_whatever_ends_and_no_block_stays_held(seed: int) -> None:
    trial = Trial(seed)
    for _ in range(12):
        end, decode_end = trial.run_request()
        request = f"d{trial.count}"
        loaded = request in trial.d.received and request not in trial.d.failed
        if end == "done" and decode_end == "done" and trial.cached < trial.tokens:
            assert loaded
        if loaded and decode_end == "done":
            targets = trial.targets[trial.cached // 4 :]
            assert (trial.d.rows[:, targets] == trial.count).all()
        assert trial.p.agent.stats()["leases"]["offered"] == 0
    trial.clock.run(1.0)
    for engine in (trial.p, trial.d):
        engine.step()
        assert engine.worker.is_idle
        assert not engine.scheduler.has_pending_work
