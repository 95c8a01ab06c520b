"""Tests of the syntax of injected faults, and of when a fault begins, ends and strikes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from random import Random
from typing import cast

import pytest

from mockgpu.fault_grammar import FaultError, FaultKind, InjectedFault, parse_faults
from mockgpu.group_faults import GroupFaults
from mockgpu.tp_group import GroupSpec, TpGroup
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.duration_limits import PATIENCE_S


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("refuse", InjectedFault(FaultKind.REFUSE)),
        ("5xx@0.1", InjectedFault(FaultKind.ERROR, chance=0.1)),
        (
            "5xx:status=503@p=0.25@10-20",
            InjectedFault(FaultKind.ERROR, status=503, chance=0.25, start_s=10, end_s=20),
        ),
        (
            "5xx:status=429:retry-after=7",
            InjectedFault(FaultKind.ERROR, status=429, retry_after_s=7),
        ),
        ("reset-before-headers", InjectedFault(FaultKind.RESET_BEFORE_HEADERS)),
        ("reset-after-headers@5-", InjectedFault(FaultKind.RESET_AFTER_HEADERS, start_s=5)),
        ("reset-mid-stream:after=5", InjectedFault(FaultKind.RESET_MID_STREAM, after=5)),
        ("stall:after=3", InjectedFault(FaultKind.STALL, after=3)),
        ("slow:x=2.5@0-1.5", InjectedFault(FaultKind.SLOW, factor=2.5, end_s=1.5)),
        ("lost-rank", InjectedFault(FaultKind.LOST_RANK)),
        (
            "die-mid-decode:after=7@0.5",
            InjectedFault(FaultKind.DIE_MID_DECODE, after=7, chance=0.5),
        ),
        ("kv-corrupt", InjectedFault(FaultKind.KV_CORRUPT)),
        ("wire-cut:after=64@1-2", InjectedFault(FaultKind.WIRE_CUT, after=64, start_s=1, end_s=2)),
        ("lost-rank:hang:rank=3", InjectedFault(FaultKind.LOST_RANK, hang=True, rank=3)),
    ],
)
def test_a_spec_reads_as_its_fault(spec: str, fault: InjectedFault) -> None:
    assert parse_faults(spec) == (fault,)


def test_several_faults_are_separated_by_commas_and_none_is_none() -> None:
    assert [fault.kind for fault in parse_faults("5xx@0.5, stall:after=2")] == [
        FaultKind.ERROR,
        FaultKind.STALL,
    ]
    assert parse_faults("") == parse_faults("  ") == ()


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "explode",
            "5xx@",
            "5xx@0",
            "5xx@1.5",
            "5xx@x",
            "5xx@3-2",
            "5xx@2-2",
            "5xx:after=1",
            "5xx:status=404",
            "5xx:retry-after=-1",
            "5xx:retry-after=1.5",
            "stall:retry-after=1",
        ),
        *(
            "stall:after",
            "stall:after=",
            "stall:after=-1",
            "stall:after=1.5",
            "slow:x=0",
            "slow:x=inf",
            "slow:x=nan",
        ),
        *(
            "lost-rank:hang=1",
            "lost-rank:x=2",
            "slow@0.5",
            "lost-rank@0.5",
            "refuse@0.5",
            "refuse,",
            ",",
            "5xx;stall",
        ),
    ],
)
def test_what_is_not_in_the_grammar_is_refused(spec: str) -> None:
    with pytest.raises(FaultError):
        parse_faults(spec)


def test_a_fault_strikes_inside_its_window_with_its_chance() -> None:
    (fault,) = parse_faults("5xx@0.25@10-20")
    rng = Random(1)
    assert not any(fault.should_strike(t, rng) for t in (0, 9.9, 20, 99))
    assert 200 < sum(fault.should_strike(15, rng) for _ in range(1000)) < 300


class RecordingDoor:
    def __init__(self) -> None:
        self.is_open = True

    def shut(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True


class RecordingConnection:
    supports_faults = True

    def __init__(self) -> None:
        self.wrong: InjectedFault | None = None

    def set_fault(self, fault: InjectedFault | None) -> None:
        self.wrong = fault


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[..., None], tuple[object, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, act: Callable[..., None], *what: object) -> None:
        """Ignore a call that the tested code schedules, because no step is computed in the test."""

    def call_later(
        self, delay_s: float, act: Callable[..., None], *what: object
    ) -> asyncio.TimerHandle:
        self._due.append((self.now + delay_s, act, what))
        return asyncio.TimerHandle(0.0, act, what, asyncio.get_event_loop())

    def to(self, now: float) -> None:
        for due in sorted(
            [timer for timer in self._due if timer[0] <= now], key=lambda timer: timer[0]
        ):
            self._due.remove(due)
            self.now = due[0]
            due[1](*due[2])
        self.now = now


def boxed(clock: ManualClock) -> tuple[GroupFaults, TpGroup, RecordingDoor, RecordingConnection]:
    loop, door, wires = (
        cast(asyncio.AbstractEventLoop, clock),
        RecordingDoor(),
        RecordingConnection(),
    )
    group = TpGroup(
        GroupSpec("m", model_named("demo-8b"), gpu_named("h100"), tp=2, speed=inf), loop
    )
    return GroupFaults(group, door, loop, Random(0), wires), group, door, wires


async def test_a_fault_that_ends_leaves_another_of_its_kind_in_force() -> None:
    clock = ManualClock()
    box, group, door, wires = boxed(clock)
    box.apply("slow:x=2@0-5,slow:x=3@2-9,refuse@0-5,refuse@2-9,lost-rank@0-5,lost-rank:rank=1@2-9")
    clock.to(6)
    assert (group.slow_prefill, door.is_open, group.is_dead) == (3, False, True)
    clock.to(9)
    assert (group.slow_prefill, door.is_open, group.is_dead) == (1, True, False)
    box.apply("wire-corrupt:after=7@0-9,freeze@2-5")
    clock.to(12)
    assert wires.wrong == InjectedFault(FaultKind.WIRE_STALL)
    clock.to(15)
    assert wires.wrong is not None
    assert wires.wrong.kind is FaultKind.WIRE_CORRUPT
    clock.to(18)
    assert wires.wrong is None


async def test_a_group_may_be_slow_at_prompts_and_at_tokens_by_different_factors() -> None:
    clock = ManualClock()
    box, group, *_ = boxed(clock)
    box.apply("slow:x=3:prefill,slow:x=5:decode@0-5")
    assert (group.slow_prefill, group.slow_decode) == (3, 5)
    clock.to(6)
    assert (group.slow_prefill, group.slow_decode) == (3, 1)
    with pytest.raises(FaultError):
        box.apply("slow:decode=2")


async def test_requests_cut_off_by_one_partition_arrive_when_the_last_one_ends() -> None:
    clock = ManualClock()
    box, *_ = boxed(clock)
    box.apply("partition@0-5,partition@2-9")
    waiting = asyncio.ensure_future(box.wait_reachable())
    clock.to(6)
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.to(9)
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_dead_group_does_not_begin_to_hang() -> None:
    box, group, *_ = boxed(ManualClock())
    changes: list[bool] = []
    group.on_change = changes.append
    box.apply("lost-rank,freeze")
    assert (group.is_dead, group.is_hanging) == (True, False)
    box.clear()
    assert (group.is_dead, changes) == (False, [False, True])


async def test_a_box_begins_and_ends_the_faults_of_a_group() -> None:
    loop, door = asyncio.get_running_loop(), RecordingDoor()
    group = TpGroup(
        GroupSpec("m", model_named("demo-8b"), gpu_named("h100"), tp=2, speed=inf), loop
    )
    box = GroupFaults(group, door, loop, Random(0))
    box.apply("slow:x=3,refuse,lost-rank")
    assert (group.slow_prefill, door.is_open, group.is_dead) == (3, False, True)
    box.apply("5xx@5-")
    assert (group.slow_prefill, door.is_open, group.is_dead) == (1, True, False)
    assert box.pick_fault() is None
    with pytest.raises(FaultError):
        box.apply("nonsense")
    assert box.spec == "5xx@5-"
    box.apply("5xx")
    struck = box.pick_fault()
    assert struck is not None
    assert struck.status == 500
    box.clear()
    assert box.pick_fault() is None
