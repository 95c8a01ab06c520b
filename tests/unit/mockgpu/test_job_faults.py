"""Tests of a mock engine that dies during a KV transfer: it frees all blocks, and can restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from math import inf
from typing import Any

import pytest

from kvtransfer.protocol.outcomes import EndReason, TransferOutcome, outcome_for
from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.handoff.kv_handoff import KvHandoff
from mockgpu.handoff.link_speed import PacedLink
from mockgpu.kv_bytes import KvMemory, scaled_layout
from mockgpu.paged_kv_cache import BLOCK_TOKENS
from mockgpu.request_parser import ApiError
from mockgpu.scheduler import Job
from mockgpu.split_legs import AgentPeer, DecodeLeg
from mockgpu.tp_group import GroupSpec, TpGroup
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.duration_limits import PATIENCE_S

BLOCKS = 64


class PendingLanding:
    def __init__(self) -> None:
        self._over = asyncio.Event()

    def cancel(self, detail: str = "") -> None:
        self._over.set()

    async def wait_ended(self) -> TransferOutcome:
        await self._over.wait()
        return outcome_for(EndReason.CANCELLED)


class BusyAgent:
    address = "here"

    def offer(self, name: str, blocks: Sequence[int], tokens: int, **more: Any) -> Any:
        raise NotImplementedError

    def fetch(
        self, address: str, name: str, blocks: Sequence[int], tokens: int, **more: Any
    ) -> PendingLanding:
        landing = PendingLanding()
        if tokens == 1:
            landing.cancel()
        return landing

    def stats(self) -> dict[str, Any]:
        return {"reservations": {"moving": 1}}

    async def close(self) -> None:
        return


class StaticDirectory:
    async def address(self, take: DecodeLeg) -> str:
        return "there"

    def forget(self, take: DecodeLeg) -> None:
        return

    async def renew(self, take: DecodeLeg) -> str | None:
        return None


class RecordingSink:
    def __init__(self) -> None:
        self.tokens, self.failures, self.over = 0, 0, asyncio.Event()

    def on_token(self) -> None:
        self.tokens += 1

    def on_end(self) -> None:
        self.over.set()

    def on_failure(self, error: ApiError) -> None:
        self.failures += 1
        self.over.set()


@pytest.fixture
async def group() -> AsyncIterator[TpGroup]:
    # Yield a decode engine that can die while it fetches KV.
    #
    # Errors in its event loop fail the test.
    loop, wrong = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    model = model_named("demo-8b")
    spec = GroupSpec(
        "m", model, gpu_named("h100"), role="decode", speed=inf, kv_tokens=BLOCKS * BLOCK_TOKENS
    )
    tp_group = TpGroup(spec, loop)
    memory = KvMemory.create(scaled_layout(model, 1, 1 / 256), BLOCKS + 1, "decode")
    tp_group.attach(memory)
    tp_group.kv_handoff = desk = KvHandoff(
        tp_group, BusyAgent(), StaticDirectory(), PacedLink(model.kv_token_bytes)
    )
    tp_group.on_change = lambda alive: None if alive else desk.drop_all()
    yield tp_group
    await desk.close()
    memory.close()
    assert not wrong


def taking(name: str) -> Job:
    return Job(10 * BLOCK_TOKENS, 5, leg=DecodeLeg(name, AgentPeer("there"), 5.0, ticket="ticket"))


@pytest.mark.parametrize(
    "beside", [taking("b"), Job(40, 5)], ids=["one that wants KV too", "one that is computed"]
)
async def test_a_group_that_dies_while_fetching_kv_leaves_no_job_with_blocks(
    group: TpGroup, beside: Job
) -> None:
    doomed, sinks = taking("a"), [RecordingSink(), RecordingSink()]
    group.mark_fault(doomed, InjectedFault(FaultKind.DIE_IN_PULL))
    for job, sink in zip((doomed, beside), sinks, strict=True):
        group.submit(job, sink, "length")
    async with asyncio.timeout(PATIENCE_S):
        for sink in sinks:
            await sink.over.wait()
        assert group.kv_handoff is not None
        while group.kv_handoff.running_tasks:
            await asyncio.sleep(0)
    assert group.is_dead
    assert [sink.failures for sink in sinks] == [1, 1]
    assert (group.scheduler.kept, group.scheduler.pool.free) == ({}, BLOCKS)


async def test_a_group_that_died_asking_for_kv_while_it_decoded_computes_again_when_it_is_restored(
    group: TpGroup,
) -> None:
    decoding, doomed, later = RecordingSink(), RecordingSink(), RecordingSink()
    group.submit(Job(40, 900), decoding, "length")
    async with asyncio.timeout(PATIENCE_S):
        while not decoding.tokens:
            await asyncio.sleep(0)
        job = taking("a")
        group.mark_fault(job, InjectedFault(FaultKind.DIE_IN_PULL))
        group.submit(job, doomed, "length")
        await doomed.over.wait()
        await asyncio.sleep(0)
        group.restore()
        group.submit(Job(40, 5), later, "length")
        await later.over.wait()
    assert (decoding.failures, doomed.failures) == (1, 1)
    assert (later.tokens, later.failures) == (5, 0)
