"""Large bodies take turns, and a client whose bodies take long to read waits between them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from time import monotonic

import pytest

from gateway import large_bodies
from gateway.large_bodies import PAUSE, QUICK_S, LargeBodies


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU seconds that the thread has spent: one number, which tests add to."""
    spent = [0.0]
    monkeypatch.setattr(large_bodies, "thread_time", lambda: spent[0])
    return spent


async def test_bodies_that_come_at_once_are_read_in_turns_of_their_own(cpu: list[float]) -> None:
    bodies, order = LargeBodies(), list[str]()

    async def read(name: str) -> None:
        await bodies.turn(name)
        order.append(name)

    reading = [asyncio.ensure_future(read(name)) for name in "abc"]
    seen = []
    while not all(each.done() for each in reading):
        await asyncio.sleep(0)
        seen.append(len(order))
    assert order == ["a", "b", "c"]
    assert {later - earlier for earlier, later in pairwise(seen)} <= {0, 1}


async def test_a_client_whose_body_took_long_waits_and_no_other(cpu: list[float]) -> None:
    bodies = LargeBodies()
    began = monotonic()
    await bodies.turn("slow")
    cpu[0] += 2 * QUICK_S
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(bodies.turn("slow")) for _ in range(2)]
    await bodies.turn("other")
    assert not any(each.done() for each in waiting)
    await asyncio.gather(*waiting)
    assert monotonic() - began >= PAUSE * 2 * QUICK_S
    await asyncio.sleep(0)
    assert not bodies._waiting


async def test_quick_bodies_wait_for_nothing(cpu: list[float]) -> None:
    bodies = LargeBodies()
    for _ in range(100):
        await bodies.turn("quick")
        cpu[0] += QUICK_S / 2
        await asyncio.sleep(0)
    assert not bodies._due
