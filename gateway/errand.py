"""Errands: a request's coroutine, stepped in the very callbacks that it waits for.

A Task takes its first step, and every step after a wait, in a later turn of the event loop: some 3 us and a delay each
time. An Errand takes the first step at once and, where it waits for a Landing, the next one in the callback that lands
it. Any other wait makes it a Task like all others, and so does a wait that needs one, which must say so: `within`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from types import coroutine
from typing import Any

Steps = Coroutine[Any, Any, None]


class Landing(asyncio.Future[None]):
    """A future whose waiter, if that is an Errand, goes on within land(). For a Task it is a future like any other."""

    __slots__ = ("errand",)
    errand: Errand | None

    def land(self, error: Exception | None = None) -> None:
        """Done, or failed; whoever awaits it goes on. Nothing happens if nobody wants to know any more."""
        if self.done():
            return
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)
        errand, self.errand = self.errand, None
        if errand is not None:
            errand.step()


def landing(loop: asyncio.AbstractEventLoop) -> Landing:
    """A new one, awaited by nobody yet."""
    made = Landing(loop=loop)
    made.errand = None
    return made


class Errand:
    """Runs a coroutine to its end; `ended` is called then, once, whatever the end was. step() begins it."""

    __slots__ = ("_ended", "_landing", "_steps", "_task")

    def __init__(self, steps: Steps, ended: Callable[[], None]) -> None:
        self._steps = steps
        self._ended = ended
        self._landing: Landing | None = None
        self._task: asyncio.Task[None] | None = None

    def step(self, error: BaseException | None = None) -> None:
        """Go on until the next wait. The coroutine is expected to let nothing out but its cancellation."""
        self._landing = None
        try:
            awaited = self._steps.send(None) if error is None else self._steps.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self._ended()
            return
        except BaseException:
            self._ended()
            raise
        if type(awaited) is Landing:
            awaited.errand = self
            self._landing = awaited
        else:
            self._task = asyncio.get_running_loop().create_task(_Rest(self._steps, awaited))
            self._task.add_done_callback(lambda _: self._ended())

    def cancel(self) -> None:
        """As Task.cancel, but at once where it can be."""
        landing = self._landing
        if self._task is not None:
            self._task.cancel()
        elif landing is not None:
            landing.errand = None
            landing.cancel()
            left = asyncio.CancelledError()
            self.step(left)
            left.__traceback__ = (
                None  # it leads back to `left`: a cycle would keep all of the request
            )


class _Rest(Coroutine[Any, Any, None]):
    """What is left of a coroutine that was stepped elsewhere and has come to wait for `awaited`.

    No generator: one that has not begun lets no cancellation in, and a Task may be cancelled before its first step.
    """

    __slots__ = ("_awaited", "_begun", "_steps")

    def __init__(self, steps: Steps, awaited: Any) -> None:
        self._steps = steps
        self._awaited = awaited
        self._begun = False

    def send(self, value: Any) -> Any:
        if self._begun:
            return self._steps.send(value)
        self._begun = True
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *error: Any) -> Any:
        awaited, self._awaited = self._awaited, None
        self._begun = True
        if isinstance(
            awaited, asyncio.Future
        ):  # as the Task would have done, had it known what it waits for
            awaited.cancel()
        try:
            return self._steps.throw(*error)
        finally:
            del error  # its traceback leads back here: a cycle would keep all of the request

    def close(self) -> None:
        self._steps.close()

    def __await__(self) -> Generator[Any, None, None]:
        raise TypeError("only a Task runs it")


@coroutine
def _on_a_task() -> Generator[None, None, None]:
    """A turn of the loop for a Task; an Errand becomes one. Asking current_task() would not do: an errand may be
    stepped out of somebody else's."""
    yield


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout on the way of a request: it cannot do without a Task, so an Errand becomes one. Not for
    anything that every request passes."""
    await _on_a_task()
    async with asyncio.timeout(seconds):
        yield
