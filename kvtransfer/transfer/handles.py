"""The objects by which an engine follows its offers and fetches of KV, and can await their end.

The agent changes them on its own threads, and LoopWaker wakes the engine's event loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtransfer.protocol.outcomes import TransferOutcome


class HandleListener(Protocol):
    """The interface of an object that the agent calls whenever one of its offers or fetches
    changes.

    The call is made on any thread, with the agent's lock held. LoopWaker is such an object.
    """

    def on_change(self, handle: TransferHandle) -> None: ...


class LoopWaker:
    """Wakes coroutines of an event loop when a KV transfer that they wait for has changed.

    The agent calls it on any thread. All waiting coroutines share one eventfd.

    defer  function that runs a call after the agent's lock was released. Otherwise the event loop
           would wake up only to wait for this lock
    ring   function that makes an eventfd readable
    clear  function that makes it unreadable
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        defer: Callable[[Callable[[], None]], None] = lambda call: call(),
        ring: Callable[[int], object] = lambda fd: os.eventfd_write(fd, 1),
        clear: Callable[[int], object] = os.eventfd_read,
    ) -> None:
        self._loop, self._defer = loop, defer
        self._ring_fd, self._clear_fd = ring, clear
        self._gate = threading.Lock()
        self._is_closed = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed_handles: deque[TransferHandle] = deque()
        loop.add_reader(self._fd, self._on_readable)

    def on_change(self, handle: TransferHandle) -> None:
        # Wake only coroutines that wait already; one that begins to wait now checks the state
        # first.
        if handle.is_awaited:
            self._changed_handles.append(handle)
            self._defer(self._ring)

    def _ring(self) -> None:
        with self._gate:
            if not self._is_closed:
                self._ring_fd(self._fd)

    def close(self) -> None:
        """Wake the coroutines whose KV transfer has changed, and release the descriptor.

        Call this on the event loop after the last change.
        """
        self._loop.remove_reader(self._fd)
        self._wake()
        with self._gate:
            self._is_closed = True
            os.close(self._fd)

    def _on_readable(self) -> None:
        self._clear_fd(self._fd)
        self._wake()

    def _wake(self) -> None:
        while self._changed_handles:
            self._changed_handles.popleft().wake()


class TransferHandle:
    """Base class of Offer and Landing: the object by which an engine follows one KV transfer.

    outcome  None until the transfer has ended; afterwards it never changes
    """

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.outcome: TransferOutcome | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_awaited(self) -> bool:
        """Return whether coroutines wait for the change that was just made, and must be woken.

        It may be read on any thread, after the change.
        """
        return self.outcome is not None and bool(self._waiters)

    async def wait_ended(self) -> TransferOutcome:
        """Wait for the end of the KV transfer and return its outcome.

        The blocks then belong to the engine again.
        """
        while self.outcome is None:
            await _wait_in(self._waiters, lambda: self.outcome is not None)
        return self.outcome

    def wake(self) -> None:
        """Wake all coroutines that wait for this transfer, because its state has changed.

        This runs on the event loop.
        """
        _wake_all(self._waiters)


async def _wait_in(waiters: set[asyncio.Future[None]], is_over: Callable[[], bool]) -> None:
    # Wait until `wake` wakes these waiters; a cancelled wait removes its future.
    waiter = asyncio.get_running_loop().create_future()
    waiters.add(waiter)
    try:
        # A change before this line was not reported, because there was no waiter.
        if not is_over():
            await waiter
    finally:
        waiters.discard(waiter)


def _wake_all(waiters: set[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class OfferOwner(Protocol):
    """The methods of the transfer agent that an Offer calls when the engine uses the Offer.

    number  the agent's number of the offer
    """

    def mark_ready(self, number: int, layers: int) -> None: ...

    def renew(self, number: int, ttl_s: float) -> str | None: ...

    def revoke(self, number: int, detail: str) -> None: ...


class LandingOwner(Protocol):
    """The methods of the transfer agent that a Landing calls when the engine uses the Landing.

    number  the agent's number of the fetch
    """

    def cancel(self, number: int, detail: str) -> None: ...


class Offer(TransferHandle):
    """An engine's handle of KV that it offers; one other agent may fetch the KV once.

    ticket  text that permits the fetch. Keep it secret: any agent that presents it may fetch
    """

    def __init__(self, owner: OfferOwner, number: int, name: str) -> None:
        super().__init__(number, name)
        self.ticket = ""
        self._owner = owner

    def mark_ready(self, layers: int) -> None:
        """Allow the KV of the first `layers` layers to be sent, because they are computed."""
        self._owner.mark_ready(self.number, layers)

    def renew(self, ttl_s: float) -> bool:
        """Keep the offered KV for at least `ttl_s` more seconds, and set a new `ticket`.

        Returns False if the offer has already ended.
        """
        ticket = self._owner.renew(self.number, ttl_s)
        self.ticket = ticket or self.ticket
        return ticket is not None

    def revoke(self, detail: str = "") -> None:
        """Take the offered blocks back immediately, even if another agent is reading them.

        The offer ends as CANCELLED.
        """
        self._owner.revoke(self.number, detail)


class Landing(TransferHandle):
    """An engine's handle of its fetch of KV from another agent.

    layers  number of layers, from layer 0 on, that have arrived and are verified. Once the outcome
            is LANDED, all layers are valid
    """

    def __init__(self, owner: LandingOwner, number: int, name: str) -> None:
        super().__init__(number, name)
        self.layers = 0
        self._owner = owner
        self._layer_waiters: set[asyncio.Future[None]] = set()

    @property
    def is_awaited(self) -> bool:
        return bool(self._layer_waiters) or super().is_awaited

    async def wait_layers(self, layers: int) -> bool:
        """Wait until the first `layers` layers of the fetched KV are complete.

        Returns False if the fetch ended before that.
        """

        def is_over() -> bool:
            return self.layers >= layers or self.outcome is not None

        while not is_over():
            await _wait_in(self._layer_waiters, is_over)
        return self.layers >= layers

    def wake(self) -> None:
        if self.outcome is not None:
            super().wake()
        _wake_all(self._layer_waiters)

    def cancel(self, detail: str = "") -> None:
        """Cancel the fetch of KV; it ends as CANCELLED once nothing can write to its blocks.

        Does nothing if the fetch has ended or is about to end.
        """
        self._owner.cancel(self.number, detail)
