"""Tests of a KV agent: invalid arguments, transports that fail, and wake-ups of the engine."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Sequence
from unittest.mock import Mock, patch

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from kvtransfer import agent as agent_module
from kvtransfer.agent import Agent
from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.kv_layout import KvContent, KvOrder, pair_fingerprint
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.agent_messages import Accept, pack_blocks
from kvtransfer.protocol.outcomes import EndReason, outcome_for
from kvtransfer.transfer.handles import Landing, LoopWaker, Offer, TransferHandle
from kvtransfer.transport_interface import LinkOwner, TransportError, WindowHead
from kvtransfer.transports import shm
from kvtransfer.transports.inproc import Inproc, InprocLink, InprocWire
from kvtransfer.transports.pump import PUMP, Digest
from kvtransfer.transports.rdma.transport import Rdma
from kvtransfer.transports.stream.link_options import LinkOptions
from kvtransfer.transports.stream.window_batch import WindowBatch
from kvtransfer.transports.tcp import Tcp
from kvtransfer.util.agent_lock import AgentLock
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import VirtualClock
from tests.contract.kvtransfer.groups import KEY, SMALL, groups
from tests.duration_limits import PATIENCE_S


class RecordingListener:
    def __init__(self) -> None:
        self.rung: list[tuple[str, bool]] = []

    def on_change(self, handle: TransferHandle) -> None:
        self.rung.append((handle.name, handle.outcome is not None))


def regions() -> list[Region]:
    size = SMALL.rank_block_bytes(0)
    return [Region.over(bytearray(8 * size), size, name="r") for _ in range(SMALL.ranks)]


def in_simulation() -> tuple[VirtualClock, Agent, Agent, RecordingListener]:
    clock = VirtualClock()
    wire = InprocWire(clock)
    ends = [Inproc(wire), Inproc(wire)]
    source, sink = (
        Agent(name, SMALL, regions(), key=KEY, transports=[end], clock=end.agent_clock)
        for name, end in zip(("p", "d"), ends, strict=True)
    )
    book = RecordingListener()
    source.open()
    sink.open(book)
    return clock, source, sink, book


def test_without_an_event_loop_a_listener_gets_every_change() -> None:
    clock, source, sink, book = in_simulation()
    offer = source.offer("r", [1], 16, public=True)
    landing = sink.fetch(source.address, "r", [2], 16)
    assert clock.run(1, lambda: bool(landing.outcome and offer.outcome))
    assert book.rung == [("r", False), ("r", True)]
    assert landing.layers == SMALL.layers


@pytest.mark.parametrize(("sealed", "fits"), [(True, False), (False, True), (None, True)])
def test_sealed_and_plain_transports_cannot_be_combined(sealed: bool | None, fits: bool) -> None:
    ways = [Tcp(options=LinkOptions(sealed=True)), Inproc(InprocWire(VirtualClock()))]
    ways[1].is_sealed, ways[1].name = None if sealed is None else not sealed, "rdma"
    if fits:
        Agent("p", SMALL, regions(), key=KEY, transports=ways)
        return
    with pytest.raises(ValueError, match="rdma would send KV unencrypted"):
        Agent("p", SMALL, regions(), key=KEY, transports=ways)


def test_an_agent_refuses_memory_that_its_layout_or_a_transport_cannot_describe() -> None:
    layers_first = replace(SMALL, order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=8)
    way = Inproc(InprocWire(VirtualClock()))
    Agent("p", layers_first, regions(), key=KEY, transports=[way])
    with pytest.raises(ValueError, match="must have 7 blocks"):
        Agent("p", replace(layers_first, blocks=7), regions(), key=KEY, transports=[way])
    for name in ("rdma", "shm"):
        way.name = name
        with pytest.raises(
            ValueError, match=f"{name} needs memory in which blocks are the outermost dimension"
        ):
            Agent("p", layers_first, regions(), key=KEY, transports=[way])


def test_rdma_reports_that_it_does_not_seal() -> None:
    assert Rdma.is_sealed is False


def test_peers_with_different_plans_end_the_transfer() -> None:
    clock, source, sink, _ = in_simulation()
    offer = source.offer("r", [1], 16, ready_layers=0, public=True)
    landing = sink.fetch(source.address, "r", [2], 16, timeout_s=60)
    assert clock.run(
        1,
        lambda: bool(
            source.stats()["leases"]["claimed"] and sink.stats()["reservations"]["moving"]
        ),
    )
    (link,) = sink._link_manager._peer_links
    assert sink.place_window(link, WindowHead(1, 99, 0, 0, 1, 8)) is None
    assert clock.run(1, lambda: bool(landing.outcome and offer.outcome))
    assert landing.outcome is not None
    assert offer.outcome is not None
    assert (landing.outcome.reason, offer.outcome.reason) == (
        EndReason.PROTOCOL,
        EndReason.PROTOCOL,
    )
    assert "group 99" in landing.outcome.detail


def test_a_source_that_plans_from_another_layout_is_refused_before_a_byte_moves() -> None:
    clock, source, sink, _ = in_simulation()
    source.offer("r", [1], 16, ready_layers=0, public=True)
    landing = sink.fetch(source.address, "r", [2], 16)
    assert clock.run(1, lambda: bool(sink.stats()["reservations"]["invited"]))
    (link,) = sink._link_manager._peer_links
    other = pair_fingerprint(replace(SMALL, block_tokens=8), SMALL)
    sink._run_commands(sink._sink.on_accept(link, Accept(1, pack_blocks([1]), 1, 100, other), 0.0))
    assert clock.run(1, lambda: landing.outcome is not None)
    assert landing.outcome is not None
    assert (landing.outcome.reason, landing.outcome.n_bytes) == (EndReason.LAYOUT, 0)
    assert other in landing.outcome.detail


def test_an_agent_needs_a_region_for_every_rank_and_a_transport() -> None:
    with pytest.raises(ValueError, match="regions"):
        Agent("p", SMALL, regions()[:1], key=KEY, transports=[Inproc(InprocWire(VirtualClock()))])
    with pytest.raises(ValueError, match="transports"):
        Agent("p", SMALL, regions(), key=KEY, transports=[])


class UnavailableTransport(Inproc):
    name = "absent"

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        raise TransportError("the test's transport finds no device")


def test_a_transport_that_does_not_start_is_dropped_unless_it_is_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    wire = InprocWire(clock)
    end, far = Inproc(wire), Inproc(wire)
    one = Agent(
        "p",
        SMALL,
        regions(),
        key=KEY,
        transports=[end, UnavailableTransport(wire)],
        clock=end.agent_clock,
    )
    two = Agent("d", SMALL, regions(), key=KEY, transports=[far], clock=far.agent_clock)
    for agent in (one, two):
        agent.open()
    assert "transport absent is not available: the test's transport finds no device" in caplog.text
    assert list(one._link_manager.card.addresses) == ["inproc"]
    one.offer("r", [1], 16, public=True)
    landing = two.fetch(one.address, "r", [2], 16)
    assert clock.run(1, lambda: landing.outcome is not None)
    assert landing.outcome is not None
    assert landing.outcome.has_landed
    alone = Agent(
        "x",
        SMALL,
        regions(),
        key=KEY,
        transports=[UnavailableTransport(wire)],
        clock=end.agent_clock,
    )
    with pytest.raises(TransportError, match="no device"):
        alone.open()


def test_a_peer_that_dials_while_an_agent_starts_finds_all_transports() -> None:
    # The better transports may start slowly.
    #
    # The first one starts last, so no peer arrives before.
    clock, begun = VirtualClock(), list[str]()
    wire = InprocWire(clock)

    class First(Inproc):
        def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
            assert agent._link_manager.card.addresses == {"slow": "far"}
            begun.append("first")
            return super().start(owner, regions)

    class Slow(UnavailableTransport):
        name = "slow"

        def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
            begun.append("slow")
            return "far"

    end = First(wire)
    agent = Agent(
        "p", SMALL, regions(), key=KEY, transports=[end, Slow(wire)], clock=end.agent_clock
    )
    agent.open()
    assert begun == ["slow", "first"]
    assert list(agent._link_manager.card.addresses) == ["inproc", "slow"]


def test_an_agent_that_fails_to_start_leaves_no_transport_open() -> None:
    clock, closed = VirtualClock(), list[str]()
    wire = InprocWire(clock)

    class Better(UnavailableTransport):
        name = "better"

        def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
            return "far"

        def close(self) -> None:
            closed.append(self.name)

    class LateTransport(Inproc):
        def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
            if not closed:
                raise TransportError("the port of the test's transport is in use")
            return super().start(owner, regions)

        def close(self) -> None:
            assert agent.address
            super().close()

    end = LateTransport(wire)
    agent = Agent(
        "p", SMALL, regions(), key=KEY, transports=[end, Better(wire)], clock=end.agent_clock
    )
    with pytest.raises(TransportError, match="the port of the test's transport is in use"):
        agent.open()
    assert closed == ["better"]
    agent.open()
    assert list(agent._link_manager.card.addresses) == ["inproc"], (
        "what was closed is not to be had"
    )


def test_an_invalid_address_is_unreachable_at_once() -> None:
    clock, _, sink, _ = in_simulation()
    landing = sink.fetch(None, "r", [2], 16)  # type: ignore[arg-type]
    assert clock.run(1, lambda: landing.outcome is not None)
    assert landing.outcome is not None
    assert landing.outcome.reason is EndReason.UNREACHABLE
    assert "None" in landing.outcome.detail


@pytest.mark.parametrize("seconds", [np.float32(9), np.float64(9), np.int64(9)])
def test_tokens_may_be_numpys_integers_and_nothing_else_and_seconds_any_number(
    seconds: float,
) -> None:
    # A value that cannot be encoded would end the link for all its transfers.
    clock, source, sink, _ = in_simulation()
    offer = source.offer("r", [1], np.int64(16), ttl_s=seconds, public=True)  # type: ignore[arg-type]
    assert offer.renew(seconds)
    landing = sink.fetch(
        source.address,
        "r",
        [2],
        np.int64(16),
        skip_tokens=np.int64(0),
        timeout_s=seconds,  # type: ignore[arg-type]
    )
    assert clock.run(1, lambda: landing.outcome is not None)
    assert landing.outcome is not None
    assert landing.outcome.has_landed
    for wrong in (16.0, "16", None):
        with pytest.raises(TypeError):
            source.offer("s", [1], wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            sink.fetch(source.address, "s", [2], wrong)  # type: ignore[arg-type]
    assert sum(sink.stats()["reservations"].values()) == 0


@ pytest . mark . parametrize ( "wrong" , [ { "beat_s" : 0.0 } , { "max_missed_beats" : 0 } , { "handshake_s" : 0.0 } , { "window_bytes" : 0 } , { "window_bytes" : 65 << 20 } , { "budget_bytes" : - 1 } ] )  # fmt: skip
def test_options_that_no_link_could_live_with_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got AgentOptions"):
        AgentOptions(**wrong)  # type: ignore[arg-type]
    if "window_bytes" in wrong:
        with pytest.raises(ValueError, match="got LinkOptions"):
            LinkOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(PUMP is None, reason="the pump is not compiled")
async def test_agents_with_default_options_move_windows_in_batches_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, received = [], []
    move = WindowBatch.move

    def spy(
        batch: WindowBatch, digest: Digest | None, stage: int = 0
    ) -> tuple[int, int | None, int]:
        (received if stage else sent).append(batch.count)
        return move(batch, digest, stage)

    monkeypatch.setattr(WindowBatch, "move", spy)
    layout = replace(SMALL, layers=1, head_dim=128, tp=1)
    size, blocks = layout.rank_block_bytes(0), list(range(63, -1, -1))
    window = replace(AgentOptions(), window_bytes=4 * size, budget_bytes=0)
    ends = [
        Agent(name, layout, [Region.over(bytearray(64 * size), size, name=name)], key=KEY,
              transports=[Tcp()], options=options)
        for name, options in (("p", AgentOptions()), ("d", window))
    ]  # fmt: skip
    for agent in ends:
        await agent.start()
    offer = ends[0].offer("r", blocks, 64 * layout.block_tokens)
    landing = ends[1].fetch(
        ends[0].address, "r", blocks, 64 * layout.block_tokens, ticket=offer.ticket
    )
    outcome = await landing.wait_ended()
    assert outcome.has_landed
    # The source has eight windows to send at first, and the sink expects half of them.
    assert max(sent) > 1
    assert received[0] == 4
    for agent in ends:
        await agent.close()


async def test_an_agent_that_fails_to_start_leaks_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken_down = []

    class Watched(LoopWaker):
        def close(self) -> None:
            super().close()
            taken_down.append(self)

    monkeypatch.setattr(agent_module, "LoopWaker", Watched)
    end = UnavailableTransport(InprocWire(VirtualClock()))
    agent = Agent("p", SMALL, regions(), key=KEY, transports=[end], clock=end.agent_clock)
    with pytest.raises(TransportError, match="no device"):
        await agent.start()
    assert len(taken_down) == 1


def test_an_engine_may_give_any_detail_when_it_gives_up() -> None:
    clock, source, sink, _ = in_simulation()
    offer = source.offer("r", [1], 16, ready_layers=0, public=True)
    landing = sink.fetch(source.address, "r", [2], 16)
    assert clock.run(1, lambda: bool(sink.stats()["reservations"]["moving"]))
    landing.cancel("of \ud800 " + 300 * "x")
    assert clock.run(1, lambda: bool(landing.outcome and offer.outcome))
    assert offer.outcome is not None
    assert offer.outcome.detail == "of ? " + 251 * "x"


def test_an_agent_offers_nothing_before_it_is_open() -> None:
    end = Inproc(InprocWire(VirtualClock()))
    agent = Agent("p", SMALL, regions(), key=KEY, transports=[end], clock=end.agent_clock)
    with pytest.raises(RuntimeError, match="not open"):
        agent.offer("r", [1], 16, public=True)


def test_a_closed_agents_timers_do_not_keep_simulated_time_busy() -> None:
    clock, source, sink, _ = in_simulation()
    source.offer("r", [1], 16, ttl_s=5, public=True)
    for agent in (source, sink):
        agent.begin_close()
        agent.finish_close()
    clock.run(1000)
    assert not clock._timers


async def test_a_fence_that_never_answers_does_not_hold_up_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "_FENCES_S", 0.05)
    monkeypatch.setattr(InprocLink, "fence", lambda link, transfer: None)
    async with groups("inproc", SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, ready_layers=0, public=True)
        landing = sink.agent.fetch(source.agent.address, "r", [1], 16)
        while not source.agent.stats()["leases"]["claimed"]:
            await asyncio.sleep(0.005)
        waiter = asyncio.create_task(landing.wait_ended())
        await sink.agent.close()
        assert (await asyncio.wait_for(waiter, PATIENCE_S)).reason is EndReason.CLOSED
        assert (await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)).reason is EndReason.CLOSED


async def test_a_waiter_that_is_cancelled_disturbs_no_other() -> None:
    async with groups("inproc", SMALL, SMALL) as (source, _):
        offer = source.agent.offer("r", [0], 16, public=True)
        one, other = (
            asyncio.create_task(offer.wait_ended()),
            asyncio.create_task(offer.wait_ended()),
        )
        await asyncio.sleep(0)
        one.cancel()
        offer.revoke()
        assert (await asyncio.wait_for(other, PATIENCE_S)).reason is EndReason.REVOKED
        assert one.cancelled() or one.cancelling()


async def test_the_event_loop_is_woken_only_for_what_a_coroutine_waits_for() -> None:
    waker = LoopWaker(asyncio.get_running_loop())
    landing = Landing(Mock(), 1, "r")
    woken = Mock(wraps=landing.wake)
    landing.wake = woken  # type: ignore[method-assign]
    ended = asyncio.create_task(landing.wait_ended())
    await asyncio.sleep(0)
    landing.layers = 1
    waker.on_change(landing)
    await asyncio.sleep(0.01)
    assert not woken.called
    first_layers = asyncio.create_task(landing.wait_layers(2))
    await asyncio.sleep(0)
    landing.layers = 2
    waker.on_change(landing)
    assert await asyncio.wait_for(first_layers, PATIENCE_S)
    assert woken.called
    assert not ended.done()
    landing.outcome = outcome_for(EndReason.LANDED)
    waker.on_change(landing)
    assert (await asyncio.wait_for(ended, PATIENCE_S)).has_landed
    waker.close()


async def test_the_event_loop_is_woken_after_the_agents_lock_is_released() -> None:
    # Woken earlier, the loop would wait for the lock with its next call to the agent.
    lock, woken = AgentLock(), asyncio.Event()
    waker = LoopWaker(asyncio.get_running_loop(), lock.defer)
    landing = Landing(Mock(), 1, "r")
    landing.wake = woken.set  # type: ignore[method-assign]
    ended = asyncio.create_task(landing.wait_ended())
    await asyncio.sleep(0)
    with lock:
        landing.outcome = outcome_for(EndReason.LANDED)
        waker.on_change(landing)
        assert not select.select([waker._fd], [], [], 0)[0]
    assert select.select([waker._fd], [], [], 0)[0]
    await asyncio.wait_for(woken.wait(), PATIENCE_S)
    ended.cancel()
    with lock:
        landing._waiters.add(asyncio.get_running_loop().create_future())
        waker.on_change(landing)
        waker.close()  # from now on, another file may get the waker's descriptor


async def test_a_change_between_the_look_and_the_wait_is_not_missed() -> None:
    # A change without a waiter rings no bell, so the coroutine itself must look again.
    offer = Offer(Mock(), 1, "r")
    loop, original = asyncio.get_running_loop(), asyncio.get_running_loop().create_future

    def change_meanwhile() -> asyncio.Future[None]:
        offer.outcome = outcome_for(EndReason.LANDED)
        return original()

    with patch.object(loop, "create_future", change_meanwhile):
        assert (await offer.wait_ended()).has_landed


async def test_cancelled_waits_are_not_retained() -> None:
    async with groups("inproc", SMALL, SMALL) as (source, _):
        offer = source.agent.offer("r", [0], 16, public=True)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(offer.wait_ended(), 0)
            waiting = asyncio.create_task(offer.wait_ended())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert not offer._waiters


async def test_an_agent_that_closes_waits_for_the_last_copy_into_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, copy, go_on = threading.Event(), shm.copy_runs, threading.Event()

    def halts(source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: ByteRuns) -> None:
        begun.set()
        go_on.wait(20)
        copy(source, sink, runs)

    monkeypatch.setattr(agent_module, "_FENCES_S", 0.05)
    monkeypatch.setattr(shm, "copy_runs", halts)
    async with groups("shm", SMALL, SMALL) as (source, sink):
        source.regions[0].bytes[:] = 9
        source.agent.offer("r", [0], 16, public=True)
        landing = sink.agent.fetch(source.agent.address, "r", [1], 16)
        assert await asyncio.to_thread(begun.wait, 20)
        closing = asyncio.create_task(sink.agent.close())
        await asyncio.wait({closing}, timeout=2.4)  # threads end in less time than this
        assert landing.outcome is None
        go_on.set()
        await asyncio.wait_for(closing, 20)
        assert landing.outcome is not None
        before = sink.snapshot()
        await asyncio.sleep(0.05)
        assert all((now == then).all() for now, then in zip(sink.snapshot(), before, strict=True))


def test_both_agents_expect_windows_once_a_transfer_is_agreed_on() -> None:
    clock, source, sink, _ = in_simulation()
    expecting: list[InprocLink] = []
    with patch.object(InprocLink, "expect_windows", lambda link: expecting.append(link)):
        offer = source.offer("r", [1, 2], 32)
        landing = sink.fetch(source.address, "r", [3, 4], 32, ticket=offer.ticket)
        clock.run(5.0, lambda: landing.outcome is not None)
    assert landing.outcome is not None
    assert landing.outcome.reason is EndReason.LANDED
    assert len(expecting) == 2
    assert expecting[0] is not expecting[1]
