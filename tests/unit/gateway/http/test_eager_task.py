"""Tests of tasks that start at once: when they continue, become asyncio tasks, or are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from gateway.http.eager_task import EagerFuture, EagerTask, new_future, timeout_after


class Log(list[str]):
    def run(self, steps: Coroutine[Any, Any, None]) -> EagerTask:
        task = EagerTask(steps, lambda: self.append("ended"))
        task.step()
        return task


async def test_a_task_starts_at_once_and_resumes_inside_resolve() -> None:
    log, awaited = Log(), new_future(asyncio.get_running_loop())

    async def steps() -> None:
        log.append("began")
        await awaited
        log.append("went on")

    log.run(steps())
    log.append("elsewhere")
    awaited.resolve()
    assert log == ["began", "elsewhere", "went on", "ended"]


async def test_a_failed_future_raises_where_it_is_awaited() -> None:
    log, awaited = Log(), new_future(asyncio.get_running_loop())

    async def steps() -> None:
        with pytest.raises(ValueError, match="no"):
            await awaited
        log.append("caught")

    log.run(steps())
    awaited.resolve(ValueError("no"))
    awaited.resolve()  # this call has no effect: `awaited` has been resolved
    assert log == ["caught", "ended"]


async def test_a_future_may_resolve_early_and_a_regular_task_may_await_it() -> None:
    log, loop = Log(), asyncio.get_running_loop()
    early, late = new_future(loop), new_future(loop)

    async def steps(awaited: EagerFuture) -> None:
        await awaited
        log.append("there")

    early.resolve()
    log.run(steps(early))
    task = asyncio.create_task(steps(late))
    await asyncio.sleep(0)
    late.resolve()
    await task
    assert log == ["there", "ended", "there"]


@pytest.mark.parametrize("wait_s", [0, 0.001])
async def test_any_other_wait_turns_it_into_a_regular_task(wait_s: float) -> None:
    log, ended, awaited = Log(), asyncio.Event(), new_future(asyncio.get_running_loop())
    ours = asyncio.current_task()

    async def steps() -> None:
        assert asyncio.current_task() is ours  # the first step runs in the task that calls step()
        await asyncio.sleep(wait_s)
        assert asyncio.current_task() is not ours
        await awaited
        log.append("there")

    EagerTask(steps(), ended.set).step()
    await asyncio.sleep(0.01)
    awaited.resolve()
    await ended.wait()
    assert log == ["there"]


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_a_task_that_became_a_regular_one_is_done_in_the_iteration_in_which_it_ends(
    error: Exception | None,
) -> None:
    log, loop = Log(), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: None)

    async def steps() -> None:
        await asyncio.sleep(0)
        loop.call_soon(log.append, "next iteration")
        if error is not None:
            raise error

    log.run(steps())
    for _ in range(4):
        await asyncio.sleep(0)
    assert log == ["ended", "next iteration"]


async def test_a_failed_future_raises_in_the_task_that_it_became() -> None:
    log, ended, future = Log(), asyncio.Event(), asyncio.get_running_loop().create_future()

    async def steps() -> None:
        with pytest.raises(ValueError, match="no"):
            await future
        log.append("caught")

    EagerTask(steps(), ended.set).step()
    future.set_exception(ValueError("no"))
    await ended.wait()
    assert log == ["caught"]


async def test_a_timeout_applies_from_the_first_wait_and_ends_with_its_block() -> None:
    log, ended, future = Log(), asyncio.Event(), asyncio.get_running_loop().create_future()

    async def steps() -> None:
        async with timeout_after(10):
            log.append("in time")
        with pytest.raises(TimeoutError):
            async with timeout_after(0.001):
                await future
        log.append("too late")

    EagerTask(steps(), ended.set).step()
    await ended.wait()
    assert log == ["in time", "too late"]
    assert future.cancelled()


async def test_cancelling_is_immediate_at_an_eager_future_and_delayed_as_a_task() -> None:
    loop = asyncio.get_running_loop()

    async def steps(log: Log, awaited: asyncio.Future[None]) -> None:
        try:
            await awaited
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    log, awaited = Log(), new_future(loop)
    log.run(steps(log, awaited)).cancel()
    assert log == ["cancelled", "ended"]
    assert awaited.cancelled()
    awaited.resolve()

    log = Log()
    log.run(steps(log, loop.create_future())).cancel()
    for _ in range(4):
        await asyncio.sleep(0)
    assert log == ["cancelled", "ended"]


async def test_a_task_that_never_waits_ends_at_once_and_ignores_cancelling() -> None:
    log = Log()

    async def steps() -> None:
        log.append("done")

    log.run(steps()).cancel()
    assert log == ["done", "ended"]
