"""Tests of how a vLLM engine uses the KV store of its host: which blocks it loads and saves, and
when.

The store is real. The tests play the role of vLLM's scheduler and workers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kvtransfer.engines.vllm.connector_options import ConnectorOptions
from kvtransfer.engines.vllm.handoff_worker import FinishedTransfers
from kvtransfer.engines.vllm.store_scheduler import (
    LOOKUP_S,
    StepWork,
    StoredRequest,
    StoreReport,
    StoreScheduler,
    measure_work,
)
from kvtransfer.engines.vllm.store_worker import StoreWorker
from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk, PromptWork
from kvtransfer.engines.vllm.weights_identity import identify_weights
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.store.block_store import BlockStore
from kvtransfer.store.reconnecting_client import StoreConnection
from kvtransfer.store.store_options import StoreOptions
from kvtransfer.store.unix_socket_server import StoreService

BLOCKS, SIZE = 64, 4
LAYOUT = KvLayout(
    2, kv_heads=2, head_dim=8, dtype=KvDtype.FP32, block_tokens=SIZE,
    order=KvOrder.LBHNC, content=KvContent.PAGES, blocks=BLOCKS, page_format="cpu-vec",
)  # fmt: skip
STEP_TOKENS = 64


class Engine:
    """The scheduler and the workers of one simulated engine. The test runs its steps one by one."""

    def __init__(
        self, path: Path, layout: KvLayout = LAYOUT, compatibility: str = "llama/v1"
    ) -> None:
        # load_s  seconds that a load takes by the workers' clock, which advances by as much at each
        #         reading
        self.layout, self.now, self.load_s = layout, 0.0, 0.0
        self._worker_s = itertools.accumulate(iter(lambda: self.load_s, None))
        self.memory = [bytearray(layout.blocks * layout.rank_block_bytes(0)) for _ in self._ranks]
        self.store = StoreConnection(path, 1 << 16, 1.0)
        self.scheduler = StoreScheduler(
            self.store, compatibility, layout, STEP_TOKENS, lambda: self.now
        )
        self._changed = threading.Event()
        self.workers = [
            StoreWorker(
                layout,
                rank,
                memoryview(self.memory[rank]),
                lambda: StoreConnection(path, 1 << 16, 1.0),
                self._changed.set,
                lambda: next(self._worker_s),
            )
            for rank in self._ranks
        ]

    @property
    def _ranks(self) -> range:
        return range(self.layout.ranks)

    def fill(self, value: int) -> None:
        for rank, memory in enumerate(self.memory):
            random = np.random.default_rng(value * 10 + rank)
            memory[:] = random.bytes(len(memory))

    def block(self, rank: int, block: int) -> list[bytes]:
        # Return the bytes of a block: one piece per layer, in the order LBHNC.
        size = self.layout.rank_layer_bytes
        layer = size * self.layout.blocks
        return [
            bytes(self.memory[rank][i * layer + block * size : i * layer + (block + 1) * size])
            for i in range(self.layout.layers)
        ]

    def step(self, *chunks: PromptChunk, step_s: float = 0.0) -> FinishedTransfers:
        # Run a step, and wait for the loads and saves that it began.
        orders = self.scheduler.take_orders(chunks)
        done, report = FinishedTransfers(), StoreReport()
        for worker in self.workers:
            worker.execute(orders, step_s)
            while not worker.is_idle:
                self._changed.wait(5.0)
                self._changed.clear()
                self._merge(done, worker.take_finished())
            report = report.merged(worker.take_report())
        self.scheduler.on_report(report)
        self.scheduler.on_ended(list(done.sent), list(done.received), list(done.failed))
        return done

    @staticmethod
    def _merge(into: FinishedTransfers, more: FinishedTransfers) -> None:
        into.sent |= more.sent
        into.received |= more.received
        into.failed |= more.failed

    def saved(self, request: StoredRequest, blocks: list[int]) -> FinishedTransfers:
        assert self.scheduler.save(request, blocks)
        self.scheduler.forget(request.id)
        return self.step()

    def counted(self) -> dict[str, float]:
        counts = self.scheduler.counts.take()
        for worker in self.workers:
            for name, amount in worker.counts.take().items():
                counts[name] = counts.get(name, 0) + amount
        counts.pop("kv_store_load_seconds", None)
        return counts

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.store.close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    service = StoreService(
        BlockStore(StoreOptions(slot_bytes=1 << 16, memory_bytes=8 << 20)), tmp_path / "s"
    )
    SERVICES[tmp_path / "s"] = service
    yield tmp_path / "s"
    if SERVICES.pop(tmp_path / "s", None) is not None:
        service.close()


SERVICES: dict[Path, StoreService] = {}


@pytest.fixture
def pair(path: Path) -> Iterator[tuple[Engine, Engine]]:
    one, two = Engine(path), Engine(path)
    one.fill(1)
    yield one, two
    one.close()
    two.close()


def request(name: str, count: int = 17, salt: str = "", variant: str = "") -> StoredRequest:
    # The first tokens of all prompts are equal.
    return StoredRequest(name, np.arange(count, dtype="<u4").tobytes(), salt, variant)


def test_blocks_that_one_engine_saved_are_loaded_by_another(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    assert one.saved(request("a"), [3, 4, 5, 6, 7]) == FinishedTransfers(sent={"a"})
    assert two.scheduler.loadable_tokens(request("b"), 0) == 16
    two.scheduler.begin_load("b", [9, 8, 7, 6, 5], 16)
    assert two.scheduler.has_pending_work
    assert two.step() == FinishedTransfers(received={"b"})
    for mine, theirs in zip([9, 8, 7, 6], [3, 4, 5, 6], strict=True):
        assert two.block(0, mine) == one.block(0, theirs)
    assert not any(map(any, two.block(0, 5))), "the last token's block is computed"
    assert not two.scheduler.has_pending_work
    assert not one.scheduler.has_pending_work
    assert two.step() == FinishedTransfers()
    assert one.counted() == {"kv_store_saved_blocks": 4}
    assert two.counted() == {"kv_store_loaded_blocks": 4}


def test_only_what_the_engine_lacks_is_loaded(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    one.saved(request("a"), [3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(request("b"), 2 * SIZE) == 2 * SIZE
    two.scheduler.begin_load("b", [9, 8, 7, 6, 5], 2 * SIZE)
    two.step()
    assert two.block(0, 7) == one.block(0, 5)
    assert not any(map(any, two.block(0, 8)))
    assert two.scheduler.loadable_tokens(request("c", 4 * SIZE), 3 * SIZE) == 0


def test_the_last_token_of_a_prompt_is_computed(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    one.saved(request("a"), [3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(request("b", 16), 0) == 12
    assert two.scheduler.loadable_tokens(request("c", 1), 0) == 0


@pytest.mark.parametrize(
    "other",
    [
        request("b", salt="theirs"),
        request("b", salt=""),
        request("b", salt="mine", variant="adapter"),
        request("b", salt="mine\0adapter"),
    ],
)
def test_another_tenant_or_adapter_finds_nothing(
    pair: tuple[Engine, Engine], other: StoredRequest
) -> None:
    one, two = pair
    one.saved(request("a", salt="mine"), [3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(other, 0) == 0
    assert two.scheduler.loadable_tokens(request("c", salt="mine"), 0) == 16


@pytest.mark.parametrize(
    ("changes", "compatibility"),
    [
        ({"order": KvOrder.BLHNC}, "llama/v1"),
        ({"page_format": "cpu-amx"}, "llama/v1"),
        ({"dtype": KvDtype.INT8}, "llama/v1"),
        ({"tp": 2}, "llama/v1"),
        ({"block_tokens": 8}, "llama/v1"),
        ({}, "llama/v2"),
    ],
)
def test_an_engine_of_another_layout_or_model_finds_nothing(
    path: Path, changes: dict[str, object], compatibility: str
) -> None:
    one, two = Engine(path), Engine(path, replace(LAYOUT, **changes), compatibility)
    one.saved(request("a", 33), list(range(8)))
    assert two.scheduler.loadable_tokens(request("b", 33), 0) == 0
    one.close()
    two.close()


def test_an_engine_with_more_blocks_shares_what_is_stored(path: Path) -> None:
    one, two = Engine(path), Engine(path, replace(LAYOUT, blocks=BLOCKS + 1))
    one.fill(1)
    one.saved(request("a"), [3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(request("b"), 0) == 16
    two.scheduler.begin_load("b", [64, 1, 2, 3, 4], 16)
    two.step()
    assert two.block(0, 64) == one.block(0, 3)
    one.close()
    two.close()


def test_each_rank_loads_its_own_part_and_a_block_without_one_is_missing(path: Path) -> None:
    layout = replace(LAYOUT, tp=2)
    one, two = Engine(path, layout), Engine(path, layout)
    one.fill(1)
    one.saved(request("a"), [3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(request("b"), 0) == 16
    two.scheduler.begin_load("b", [9, 8, 7, 6, 5], 16)
    assert two.step() == FinishedTransfers(received={"b"})
    for rank in (0, 1):
        assert two.block(rank, 9) == one.block(rank, 3)
    assert two.block(0, 9) != two.block(1, 9)
    assert one.scheduler.save(request("c", 33), list(range(8)))
    orders = one.scheduler.take_orders()
    one.workers[0].execute(orders, 0.0)
    while not one.workers[0].take_finished().sent:
        pass
    assert two.scheduler.loadable_tokens(request("d", 33), 0) == 16, "rank 1 saved four blocks"
    one.close()
    two.close()


def test_an_engine_without_a_store_computes_and_reports_no_error(path: Path) -> None:
    SERVICES.pop(path).close()
    engine = Engine(path)
    assert engine.scheduler.loadable_tokens(request("a"), 0) == 0
    engine.scheduler.begin_load("a", [1, 2, 3, 4, 5], 0)
    assert engine.saved(request("a"), [1, 2, 3, 4]) == FinishedTransfers(sent={"a"})
    assert engine.counted() == {"kv_store_lost_calls": 2}
    engine.close()


def loading(pair: tuple[Engine, Engine]) -> Engine:
    # Return the second engine, which begins to load what the first one has stored.
    one, two = pair
    one.saved(request("a"), [3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(request("b"), 0) == 16
    two.scheduler.begin_load("b", [9, 8, 7, 6, 5], 16)
    return two


def test_a_store_that_is_lost_after_the_lookup_fails_the_load_alone(
    path: Path, pair: tuple[Engine, Engine]
) -> None:
    two = loading(pair)
    SERVICES.pop(path).close()
    assert two.step() == FinishedTransfers(received={"b"}, failed={"b"})
    assert two.scheduler.loadable_tokens(request("b"), 0) == 0, "it is computed now"
    two.scheduler.begin_load("b", [9, 8, 7, 6, 5], 0)
    assert two.step() == FinishedTransfers()
    assert two.counted() == {"kv_store_failed_loads": 1, "kv_store_lost_calls": 1}


def test_blocks_that_are_evicted_after_the_lookup_fail_the_load(
    path: Path, pair: tuple[Engine, Engine]
) -> None:
    two = loading(pair)
    index = SERVICES[path].store._index.memory
    index.drop(list(index.keys())[-1])
    assert two.step().failed == {"b"}
    assert two.counted() == {"kv_store_failed_loads": 1}


def test_the_blocks_of_an_answer_are_saved_but_for_the_last_token(
    pair: tuple[Engine, Engine],
) -> None:
    one, two = pair
    prompt, ended = request("a", 10), request("a", 24)
    assert one.scheduler.loadable_tokens(prompt, 0) == 0
    one.scheduler.begin_load("a", [1, 2, 3], 0)
    one.saved(ended, [1, 2, 3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(request("b", 40), 0) == 20


def test_a_request_whose_blocks_were_freed_in_part_saves_the_others(
    pair: tuple[Engine, Engine],
) -> None:
    one, two = pair
    one.saved(request("a"), [3, 4])
    assert two.scheduler.loadable_tokens(request("b"), 0) == 8
    assert not one.scheduler.save(request("c", 1), [1])
    assert not one.scheduler.save(request("d"), [])


def test_few_blocks_are_kept_for_saving(pair: tuple[Engine, Engine]) -> None:
    one, _ = pair
    assert one.scheduler.save(request("a", 4 * SIZE + 1), [1, 2, 3, 4])
    assert not one.scheduler.save(request("b", 5 * SIZE + 1), [5, 6, 7, 8, 9])
    assert one.scheduler.save(request("c", 4 * SIZE + 1), [5, 6, 7, 8])
    one.step()
    assert one.scheduler.save(request("b", 5 * SIZE + 1), [5, 6, 7, 8, 9])
    assert one.counted()["kv_store_skipped_saves"] == 1


def after_one_load(pair: tuple[Engine, Engine], step_s: float, load_s: float) -> Engine:
    # Return the second engine, which has computed 1,000 tokens and loaded 16 that the first saved.
    #
    # The seconds of each are the engine's first observations of its own speed and the store's.
    one, two = pair
    one.saved(request("a"), [3, 4, 5, 6])
    two.step(PromptChunk("x", 0, 1000), step_s=step_s)
    two.load_s = load_s
    assert two.scheduler.loadable_tokens(request("b"), 0) == 16, "memory counts as fast at first"
    two.scheduler.begin_load("b", [9, 8, 7, 6, 5], 16)
    two.step()
    return two


def test_stored_blocks_that_are_faster_to_compute_are_declined(
    pair: tuple[Engine, Engine],
) -> None:
    two = after_one_load(pair, step_s=0.001, load_s=1.0)
    two.counted()
    assert two.scheduler.loadable_tokens(request("c"), 0) == 0
    two.scheduler.begin_load("c", [9, 8, 7, 6, 5], 0)
    assert two.counted() == {"kv_store_declined_tokens": 16}


def test_blocks_are_loaded_although_computing_is_faster_while_other_prompts_are_computed(
    pair: tuple[Engine, Engine],
) -> None:
    two = after_one_load(pair, step_s=1.0, load_s=0.5)
    assert two.scheduler.loadable_tokens(request("idle"), 0) == 0
    # 4,000 tokens take 4 s, in steps of 1,000.
    two.step(PromptChunk("long", 0, 1000, 4000), step_s=1.0)
    assert two.scheduler.loadable_tokens(request("busy"), 0) == 16
    two.step(PromptChunk("long", 1000, 2980), step_s=2.98)
    assert two.scheduler.loadable_tokens(request("soon idle"), 0) == 0


def test_a_prompt_of_the_same_step_counts_as_work_before_the_next(
    pair: tuple[Engine, Engine],
) -> None:
    two = after_one_load(pair, step_s=1.0, load_s=0.5)
    long = StoredRequest("long", b"\1\0\0\0" * 4000)
    assert two.scheduler.loadable_tokens(long, 0) == 0
    two.scheduler.begin_load("long", list(range(1000)), 0)
    assert two.scheduler.loadable_tokens(request("next"), 0) == 16
    two.scheduler.forget("long")
    assert two.scheduler.loadable_tokens(request("after its abort"), 0) == 0


def test_a_request_that_waits_for_blocks_is_not_looked_up_at_each_step(
    path: Path, pair: tuple[Engine, Engine]
) -> None:
    one, two = pair
    assert two.scheduler.loadable_tokens(request("b"), 0) == 0
    one.saved(request("a"), [3, 4, 5, 6])
    assert two.scheduler.loadable_tokens(request("b"), 0) == 0
    two.now += 1.1 * LOOKUP_S
    assert two.scheduler.loadable_tokens(request("b"), 0) == 16
    assert two.scheduler.loadable_tokens(request("b"), 8) == 8, "more is cached here by now"


def test_an_ended_request_leaves_nothing_behind(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    one.saved(request("a"), [3, 4, 5, 6])
    for name in ("looked up", "loading", "used"):
        two.scheduler.loadable_tokens(request(name), 0)
    two.scheduler.begin_load("loading", [9, 8, 7, 6, 5], 16)
    two.scheduler.begin_load("used", [19, 18, 17, 16, 15], 16)
    for name in ("looked up", "loading", "used"):
        two.scheduler.forget(name)
    assert two.step().received == {"loading", "used"}
    state = vars(two.scheduler)
    names = ("_keys", "_chosen", "_used", "_loading", "_load_s", "_saving", "_prompts")
    assert {name for name in names if state[name]} == set()


def test_prompts_are_left_until_their_last_token_is_computed() -> None:
    work = PromptWork()
    work.on_step([PromptChunk("a", 0, 60, 100), PromptChunk("b", 8, 2, 10), PromptChunk("c", 9, 1)])
    assert dict(enumerate(work.others(""))) == {0: (60, 100)}
    work.on_step([PromptChunk("a", 60, 30)])
    assert list(work.others("")) == [(90, 100)]
    assert not list(work.others("a"))
    # A preempted request is computed again from its cached tokens on.
    work.on_step([PromptChunk("a", 16, 60)])
    assert list(work.others("")) == [(76, 100)]
    work.on_step([PromptChunk("a", 76, 24)])
    work.on_step([PromptChunk("a", 100, 1)])
    assert not len(work)


def test_the_work_of_a_step_is_that_of_its_prompts() -> None:
    decode = PromptChunk("c", 70, 1)
    chunks = [PromptChunk("a", 0, 100), PromptChunk("b", 500, 10), decode]
    assert measure_work(chunks) == StepWork(110, 100 * 50 + 10 * 505)
    assert measure_work([decode]) == StepWork()


def test_the_report_of_several_ranks_is_that_of_the_slowest() -> None:
    work = StepWork(10, 5.0)
    one, two = StoreReport({"a": 1.0, "b": 3.0}, work, 0.5), StoreReport({"a": 2.0}, work, 0.7)
    assert one.merged(two) == StoreReport({"a": 2.0, "b": 3.0}, work, 0.7)
    assert StoreReport().merged(one) == one


def test_the_store_needs_the_policy_recompute(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32 + b"\n")
    members = {"key_file": str(tmp_path / "key"), "store": "/run/s"}
    options = ConnectorOptions(members, "recompute")
    assert (options.key, options.store) == (b"k" * 32, Path("/run/s"))
    with pytest.raises(ValueError, match="a store needs 'recompute'"):
        ConnectorOptions(members, "fail")
    assert ConnectorOptions({"key_file": members["key_file"]}, "fail").store is None
    with pytest.raises(ValueError, match="unknown member stor"):
        ConnectorOptions(members | {"stor": "x"}, "recompute")
    with pytest.raises(ValueError, match="set key_file in kv_connector_extra_config"):
        ConnectorOptions({}, "recompute")


def test_weights_that_are_trained_further_have_another_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1" * 100)
    first = identify_weights(str(tmp_path), ["main"])
    assert first == identify_weights(str(tmp_path), ["main"])
    assert first != identify_weights(str(tmp_path), ["other revision"])
    weights.write_bytes(b"2" * 101)
    assert first != identify_weights(str(tmp_path), ["main"])
    assert identify_weights("org/model", []) != identify_weights("org/other", [])
