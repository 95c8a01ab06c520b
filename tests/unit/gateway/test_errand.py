"""Errands: what is done at once, what makes them Tasks, and how they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from gateway.errand import Errand, Landing, landing, within


class Log(list[str]):
    """What happened, in order."""

    def run(self, steps: Coroutine[Any, Any, None]) -> Errand:
        errand = Errand(steps, lambda: self.append("ended"))
        errand.step()
        return errand


async def test_the_first_step_is_taken_at_once_and_the_next_one_where_its_landing_lands() -> None:
    log, place = Log(), landing(asyncio.get_running_loop())

    async def steps() -> None:
        log.append("began")
        await place
        log.append("went on")

    log.run(steps())
    log.append("elsewhere")
    place.land()
    assert log == ["began", "elsewhere", "went on", "ended"]


async def test_a_landing_that_fails_raises_where_it_is_awaited() -> None:
    log, place = Log(), landing(asyncio.get_running_loop())

    async def steps() -> None:
        with pytest.raises(ValueError, match="no"):
            await place
        log.append("caught")

    log.run(steps())
    place.land(ValueError("no"))
    place.land()  # nobody waits any more: nothing happens
    assert log == ["caught", "ended"]


async def test_a_landing_may_land_before_it_is_awaited_and_a_task_may_await_it() -> None:
    log, loop = Log(), asyncio.get_running_loop()
    early, late = landing(loop), landing(loop)

    async def steps(place: Landing) -> None:
        await place
        log.append("there")

    early.land()
    log.run(steps(early))
    task = asyncio.create_task(steps(late))
    await asyncio.sleep(0)
    late.land()
    await task
    assert log == ["there", "ended", "there"]


@pytest.mark.parametrize("wait_s", [0, 0.001])
async def test_any_other_wait_makes_it_a_task(wait_s: float) -> None:
    log, ended, place = Log(), asyncio.Event(), landing(asyncio.get_running_loop())
    ours = asyncio.current_task()

    async def steps() -> None:
        assert asyncio.current_task() is ours  # that of whoever steps it, if there is one
        await asyncio.sleep(wait_s)
        assert asyncio.current_task() is not ours
        await place
        log.append("there")

    errand = Errand(steps(), ended.set)
    errand.step()
    await asyncio.sleep(0.01)
    place.land()
    await ended.wait()
    assert log == ["there"]


async def test_a_future_that_fails_raises_in_the_errand_that_became_a_task() -> None:
    log, ended, future = Log(), asyncio.Event(), asyncio.get_running_loop().create_future()

    async def steps() -> None:
        with pytest.raises(ValueError, match="no"):
            await future
        log.append("caught")

    Errand(steps(), ended.set).step()
    future.set_exception(ValueError("no"))
    await ended.wait()
    assert log == ["caught"]


async def test_a_limit_in_time_works_at_its_first_wait_and_lets_go_in_time() -> None:
    log, ended, future = Log(), asyncio.Event(), asyncio.get_running_loop().create_future()

    async def steps() -> None:
        async with within(10):
            log.append("in time")
        with pytest.raises(TimeoutError):
            async with within(0.001):
                await future
        log.append("too late")

    Errand(steps(), ended.set).step()
    await ended.wait()
    assert log == ["in time", "too late"]
    assert future.cancelled()


async def test_cancelling_reaches_it_at_a_landing_at_once_and_as_a_task_soon() -> None:
    loop = asyncio.get_running_loop()

    async def steps(log: Log, place: asyncio.Future[None]) -> None:
        try:
            await place
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    log, place = Log(), landing(loop)
    log.run(steps(log, place)).cancel()
    assert log == ["cancelled", "ended"]
    assert place.cancelled()
    place.land()

    log = Log()
    log.run(steps(log, loop.create_future())).cancel()
    for _ in range(4):
        await asyncio.sleep(0)
    assert log == ["cancelled", "ended"]


async def test_an_errand_that_never_waits_is_over_at_once_and_cancelling_it_then_does_nothing() -> (
    None
):
    log = Log()

    async def steps() -> None:
        log.append("done")

    log.run(steps()).cancel()
    assert log == ["done", "ended"]
