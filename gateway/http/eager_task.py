"""Eager tasks: coroutines that resume inside the callback that completes their wait.

asyncio resumes a Task in a later loop iteration, which costs a few microseconds and some latency
each time. An EagerTask starts at once, and when it awaits an EagerFuture it resumes inside that
future's resolve(). Any other wait turns it into a regular Task, as does timeout_after().
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from types import coroutine
from typing import Any

TaskCoroutine = Coroutine[Any, Any, None]


class EagerFuture(asyncio.Future[None]):
    """A future that resumes a waiting EagerTask inside resolve(); a Task awaits it as usual."""

    __slots__ = ("waiter",)
    waiter: EagerTask | None

    def resolve(self, error: Exception | None = None) -> None:
        """Set the result or the exception and resume the waiter; no-op if already done."""
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
    """Return a new pending EagerFuture."""
    future = EagerFuture(loop=loop)
    future.waiter = None
    return future


class EagerTask:
    """Runs a coroutine to its end, eagerly where possible. step() starts it.

    `on_done` is called exactly once when the coroutine ends, however it ends.
    """

    __slots__ = ("_coroutine", "_on_done", "_task", "_waits_for")

    def __init__(self, coroutine: TaskCoroutine, on_done: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_done = on_done
        self._waits_for: EagerFuture | None = None
        self._task: asyncio.Task[None] | None = None

    def step(self, error: BaseException | None = None) -> None:
        """Run to the next wait, raising `error` inside the coroutine if given.

        The coroutine should raise nothing but CancelledError; other exceptions propagate.
        """
        self._waits_for = None
        try:
            awaited = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self._on_done()
            return
        except BaseException:
            self._on_done()
            raise
        if type(awaited) is EagerFuture:
            awaited.waiter = self
            self._waits_for = awaited
        else:
            remainder = _Remainder(self._coroutine, awaited)
            self._task = asyncio.get_running_loop().create_task(remainder)
            self._task.add_done_callback(lambda _: self._on_done())

    def cancel(self) -> None:
        """Cancel like Task.cancel(), but immediately if waiting for an EagerFuture."""
        waits_for = self._waits_for
        if self._task is not None:
            self._task.cancel()
        elif waits_for is not None:
            waits_for.waiter = None
            waits_for.cancel()
            cancellation = asyncio.CancelledError()
            self.step(cancellation)
            # Its traceback refers back to it: the cycle would keep the whole request alive.
            cancellation.__traceback__ = None


class _Remainder(Coroutine[Any, Any, None]):
    """The rest of a coroutine that was stepped eagerly and now awaits `awaited` in a Task.

    Not a generator, because a Task may be cancelled before its first step, and an unstarted
    generator does not pass that exception on to the code inside it.
    """

    __slots__ = ("_awaited", "_coroutine", "_is_started")

    def __init__(self, coroutine: TaskCoroutine, awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._is_started = False

    def send(self, value: Any) -> Any:
        if self._is_started:
            return self._coroutine.send(value)
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
            return self._coroutine.throw(*error)
        finally:
            del error  # its traceback refers to this frame: a cycle that keeps the request alive

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, None]:
        raise TypeError("only a Task may run this coroutine")


@coroutine
def _become_task() -> Generator[None, None, None]:
    """Yield once, which turns an EagerTask into a Task.

    Checking asyncio.current_task() would not do: an eager task may be stepped from another Task.
    """
    yield


@asynccontextmanager
async def timeout_after(seconds: float) -> AsyncIterator[None]:
    """Like asyncio.timeout(), for code that may run in an EagerTask.

    asyncio.timeout() needs a Task, so an EagerTask becomes one. Do not use it where every request
    passes.
    """
    await _become_task()
    async with asyncio.timeout(seconds):
        yield
