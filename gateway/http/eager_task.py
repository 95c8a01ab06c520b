"""Eager tasks: coroutines that resume inside the callback that completes what they await.

asyncio resumes a Task in a later event loop iteration, which costs a few microseconds each time. An
EagerTask starts immediately. When it awaits an EagerFuture, it resumes inside that future's
resolve(). Any other await turns it into a regular Task, as timeout_after() does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from types import coroutine
from typing import Any

TaskCoroutine = Coroutine[Any, Any, None]

_ENDED = object()
"""What next() returns at the end of a coroutine, where send() would raise StopIteration.

An exception costs as much as several steps.
"""


class EagerFuture(asyncio.Future[None]):
    """A future that resumes the waiting EagerTask inside resolve(), not in a later iteration.

    A regular Task may await it too; it resumes in a later event loop iteration as usual.
    """

    __slots__ = ("waiter",)
    waiter: EagerTask | None

    def resolve(self, error: Exception | None = None) -> None:
        """Complete the future, and resume the EagerTask that waits for it.

        If `error` is given, it is raised in the task. Does nothing if the future is already done.
        """
        if self.done():
            return
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)
        task, self.waiter = self.waiter, None
        if task is not None:
            task.step()


def new_future(loop: asyncio.AbstractEventLoop) -> EagerFuture:
    future = EagerFuture(loop=loop)
    future.waiter = None
    return future


class EagerTask:
    """A task that runs its coroutine inside its caller where possible. step() starts it.

    `on_done` is called exactly once, when the coroutine ends for any reason.
    """

    __slots__ = ("_on_done", "_steps", "_task", "_waits_for")

    def __init__(self, coroutine: TaskCoroutine, on_done: Callable[[], None]) -> None:
        self._steps: Generator[Any, None, None] = coroutine.__await__()
        self._on_done = on_done
        self._waits_for: EagerFuture | None = None
        self._task: asyncio.Task[None] | None = None

    def step(self, error: BaseException | None = None) -> None:
        """Run the task's coroutine up to its next wait; first raise `error` in it, if given.

        If the coroutine raises CancelledError, the task has ended. Any other exception is raised to
        the caller of step().
        """
        self._waits_for = None
        try:
            awaited = next(self._steps, _ENDED) if error is None else self._steps.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self._on_done()
            return
        except BaseException:
            self._on_done()
            raise
        if type(awaited) is EagerFuture:
            awaited.waiter = self
            self._waits_for = awaited
        elif awaited is _ENDED:
            self._on_done()
        else:
            remainder = _Remainder(self._steps, awaited, self._on_done)
            self._task = asyncio.get_running_loop().create_task(remainder)

    def cancel(self) -> None:
        """Cancel the task like asyncio.Task.cancel().

        If the coroutine awaits an EagerFuture, it is cancelled immediately.
        """
        waits_for = self._waits_for
        if self._task is not None:
            self._task.cancel()
        elif waits_for is not None:
            waits_for.waiter = None
            waits_for.cancel()
            cancellation = asyncio.CancelledError()
            self.step(cancellation)
            # The error's traceback refers to this task, a cycle that would keep the whole request.
            cancellation.__traceback__ = None


class _Remainder(Coroutine[Any, Any, None]):
    # The rest of a coroutine that ran eagerly and now continues in a Task, awaiting `awaited`.
    #
    # This class is not a generator, because a Task may be cancelled before its first step, and a
    # generator that has not started does not pass the cancellation on to the code inside it.
    #
    # `on_done` is called when the coroutine ends. A done callback of the Task would run an event
    # loop iteration later. The client, which has its response by then, may have sent its next
    # request, which would count as pipelined.

    __slots__ = ("_awaited", "_is_started", "_on_done", "_steps")

    def __init__(
        self, steps: Generator[Any, None, None], awaited: Any, on_done: Callable[[], None]
    ) -> None:
        self._steps = steps
        self._awaited = awaited
        self._on_done = on_done
        self._is_started = False

    def send(self, value: Any) -> Any:
        if self._is_started:
            try:
                return self._steps.send(value)
            except BaseException:
                self._on_done()
                raise
        self._is_started = True
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *error: Any) -> Any:
        awaited, self._awaited = self._awaited, None
        self._is_started = True
        # The Task would have cancelled this future if it had known that it waits for it.
        if isinstance(awaited, asyncio.Future):
            awaited.cancel()
        try:
            return self._steps.throw(*error)
        except BaseException:
            self._on_done()
            raise
        finally:
            del error  # the traceback refers to this frame, a cycle that would keep the request

    def close(self) -> None:
        self._steps.close()

    def __await__(self) -> Generator[Any, None, None]:
        raise TypeError("this coroutine cannot be awaited; pass it to an asyncio.Task")


@coroutine
def _become_task() -> Generator[None, None, None]:
    # Turn the running EagerTask into a Task, by yielding once to the event loop.
    #
    # asyncio.current_task() cannot decide whether this is needed, since another Task may have
    # called step().
    yield


@asynccontextmanager
async def timeout_after(seconds: float) -> AsyncIterator[None]:
    """Limit the duration of an `async with` block like asyncio.timeout(), also in an EagerTask.

    asyncio.timeout() needs a Task, so an EagerTask becomes one here. That costs time; do not use
    this function in code that every request runs. Raises TimeoutError.
    """
    await _become_task()
    async with asyncio.timeout(seconds):
        yield
