"""Tests that large bodies are parsed one at a time, and other requests are served in between."""

from __future__ import annotations

import asyncio
import tracemalloc
from itertools import pairwise
from time import monotonic

import pytest

from gateway.http import large_body_parsing
from gateway.http.large_body_parsing import (
    JOINED_AT_ONCE,
    MAX_PAUSE_S,
    MAX_SLOWNESS,
    PAUSE_FACTOR,
    QUICK_S,
    REFERENCE_S,
    LargeBodies,
    join_pieces,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


@pytest.fixture
def cpu_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    # Replace the thread's CPU time by a list with one number, which tests increase. The machine is
    # as fast as the reference.
    spent = [0.0]
    monkeypatch.setattr(large_body_parsing, "thread_time", lambda: spent[0])
    monkeypatch.setattr(large_body_parsing, "decode_object", lambda _: None)
    return spent


async def test_simultaneous_bodies_are_parsed_in_loop_iterations_of_their_own(
    cpu_s: list[float],
) -> None:
    bodies, order = LargeBodies(), list[str]()

    async def parse(name: str) -> None:
        await bodies.join_in_turn(name, [])
        order.append(name)

    tasks = [asyncio.ensure_future(parse(name)) for name in "abc"]
    counts = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        counts.append(len(order))
    assert order == ["a", "b", "c"]
    assert {later - earlier for earlier, later in pairwise(counts)} <= {0, 1}


async def test_only_the_client_of_a_slow_body_has_to_wait(cpu_s: list[float]) -> None:
    bodies = LargeBodies()
    began = monotonic()
    await bodies.join_in_turn("slow", [])
    cpu_s[0] += 2 * QUICK_S
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(bodies.join_in_turn("slow", [])) for _ in range(2)]
    await bodies.join_in_turn("other", [])
    assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)
    assert monotonic() - began == pytest.approx(PAUSE_FACTOR * QUICK_S, abs=0.01)
    await asyncio.sleep(0)
    assert not bodies._waiting


async def test_the_client_of_quick_bodies_never_waits(cpu_s: list[float]) -> None:
    bodies = LargeBodies()
    for _ in range(100):
        await bodies.join_in_turn("quick", [])
        cpu_s[0] += QUICK_S / 2
        await asyncio.sleep(0)
    assert not bodies._paused_until


async def test_slow_bodies_of_a_client_that_arrive_at_once_are_not_parsed_one_after_another(
    cpu_s: list[float],
) -> None:
    bodies, parsed = LargeBodies(), list[str]()

    async def parse(client: str) -> None:
        await bodies.join_in_turn(client, [])
        parsed.append(client)
        cpu_s[0] += 2 * QUICK_S

    tasks = [asyncio.ensure_future(parse(client)) for client in ("slow", "slow", "slow", "other")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert parsed == ["slow", "other"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_pieces_of_a_large_body_are_joined_over_several_iterations() -> None:
    pieces = [bytes([number]) * 100_000 for number in range(50)]
    expected, left = b"".join(pieces), [50]
    joining = asyncio.ensure_future(join_pieces(pieces))
    while not joining.done():
        await asyncio.sleep(0)
        left.append(len(pieces))
    assert joining.result() == expected
    most = JOINED_AT_ONCE // 100_000 + 1
    assert max(before - after for before, after in pairwise(left)) <= most
    assert not pieces


async def test_a_joined_body_is_never_in_memory_twice() -> None:
    pieces = [bytes(65_536) for _ in range(128)]
    size = sum(map(len, pieces))
    tracemalloc.start()
    try:
        body = await join_pieces(pieces)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) == size
    assert peak < 1.2 * size  # memory allocated before tracing began does not count


async def test_bodies_that_wait_for_their_turn_are_not_joined(cpu_s: list[float]) -> None:
    bodies = LargeBodies()
    await bodies.join_in_turn("slow", [])
    cpu_s[0] += 2 * QUICK_S
    await asyncio.sleep(0)
    pieces = [b"a" * 100_000 for _ in range(20)]
    waiting = asyncio.ensure_future(bodies.join_in_turn("slow", pieces))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(pieces) == 20
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_the_pause_grows_from_zero_with_the_time_beyond_the_limit(cpu_s: list[float]) -> None:
    bodies, pauses = LargeBodies(), []
    for cost_s in (1.01 * QUICK_S, 2 * QUICK_S, 1000 * QUICK_S):
        await bodies.join_in_turn(f"{cost_s}", [])
        cpu_s[0] += cost_s
        began = monotonic()
        await asyncio.sleep(0)
        pauses.append(bodies._paused_until[f"{cost_s}"] - began)
    assert [round(pause) for pause in pauses] == [0, round(PAUSE_FACTOR * QUICK_S), MAX_PAUSE_S]


async def test_quick_bodies_that_wait_for_a_pause_follow_one_another_without_another(
    cpu_s: list[float],
) -> None:
    bodies = LargeBodies()
    await bodies.join_in_turn("image", [])
    cpu_s[0] += 1.1 * QUICK_S
    await asyncio.sleep(0)
    began = monotonic()
    for each in [asyncio.ensure_future(bodies.join_in_turn("image", [])) for _ in range(4)]:
        await each
    await asyncio.sleep(0)
    assert monotonic() - began < MAX_PAUSE_S / 2
    assert bodies._paused_until["image"] < monotonic()


async def test_a_body_that_is_given_up_before_its_turn_holds_up_no_other(
    cpu_s: list[float],
) -> None:
    bodies = LargeBodies()
    await bodies.join_in_turn("slow", [])
    cpu_s[0] += 1.01 * QUICK_S
    await asyncio.sleep(0)
    async with bodies._one_at_a_time:
        given_up, last = (asyncio.ensure_future(bodies.join_in_turn("slow", [])) for _ in range(2))
        await asyncio.sleep(2 * PAUSE_FACTOR * 0.01 * QUICK_S)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
    await last
    for _ in range(3):
        await asyncio.sleep(0)
    assert not bodies._waiting


async def test_a_machine_that_is_slow_at_the_moment_allows_more_time(
    cpu_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies, allowed_s = LargeBodies(), {0.5: QUICK_S, 1.0: QUICK_S, 2.0: 2 * QUICK_S}
    allowed_s[100.0] = MAX_SLOWNESS * QUICK_S
    for slowness, most_s in allowed_s.items():

        def parse(_: bytes, cost_s: float = slowness * REFERENCE_S) -> None:
            cpu_s[0] += cost_s

        monkeypatch.setattr(large_body_parsing, "decode_object", parse)
        for excess_s in (-0.0001, 0.001):
            bodies._paused_until.clear()
            await bodies.join_in_turn("client", [])
            cpu_s[0] += most_s + excess_s
            began = monotonic()
            await asyncio.sleep(0)
            until = bodies._paused_until.get("client", began)
            assert until - began == pytest.approx(max(0.0, excess_s) * PAUSE_FACTOR, abs=0.001)


async def test_what_the_request_does_in_later_iterations_is_not_counted(
    cpu_s: list[float],
) -> None:
    bodies = LargeBodies()
    await bodies.join_in_turn("image", [])
    asyncio.get_running_loop().call_soon(cpu_s.__setitem__, 0, 1.0)  # as the engine's connection
    await asyncio.sleep(0)
    assert not bodies._paused_until
