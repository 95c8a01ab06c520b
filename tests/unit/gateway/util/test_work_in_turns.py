"""Tests of work that is divided into turns of the event loop."""

from __future__ import annotations

import asyncio

from gateway.util.work_in_turns import (
    ITEMS_PER_TURN,
    Steps,
    WorkMeter,
    run_at_once,
    run_in_turns,
    slices,
)


def count_to(number: int) -> Steps[int]:
    for _ in range(number):
        yield
    return number


async def test_other_work_runs_between_two_steps() -> None:
    done: list[str] = []

    async def note(name: str, turns: int) -> int:
        result = await run_in_turns(count_to(turns))
        done.append(name)
        return result

    assert await asyncio.gather(note("long", 5), note("short", 1)) == [5, 1]
    assert done == ["short", "long"]


def test_work_done_at_once_has_the_same_result() -> None:
    assert run_at_once(count_to(3)) == 3


def test_a_part_is_over_after_the_permitted_items() -> None:
    meter = WorkMeter()
    assert [meter.is_part_over() for _ in range(2 * ITEMS_PER_TURN)].count(True) == 2
    assert meter.is_part_over(ITEMS_PER_TURN)
    assert not meter.is_part_over(ITEMS_PER_TURN - 1)
    assert meter.is_part_over()


def test_slices_contain_every_item_once() -> None:
    items = list(range(10))
    assert [list(part) for part in slices(items, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
