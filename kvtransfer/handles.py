"""Handles: what an engine holds of its offers and landings, and the doorbell through which the agent's threads wake it.

Not here: deciding anything. A handle is written by the agent and awaited on the event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Protocol

from kvtransfer.ends import End


class Bell(Protocol):
    """Who hears that a handle has changed: on any thread, with the agent's lock held."""

    def ring(self, handle: Handle) -> None: ...


class Doorbell:
    """Wakes waiters of handles on one event loop, from any thread, through one eventfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung: deque[Handle] = deque()
        loop.add_reader(self._fd, self._answer)

    def ring(self, handle: Handle) -> None:
        self._rung.append(handle)
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """On the loop, when nothing rings any more. Who still waits is woken."""
        self._loop.remove_reader(self._fd)
        self._wake()
        os.close(self._fd)

    def _answer(self) -> None:
        os.eventfd_read(self._fd)
        self._wake()

    def _wake(self) -> None:
        while self._rung:
            self._rung.popleft().wake()


class Handle:
    """`end` is None until it has ended; that is for good."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.end: End | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    async def ended(self) -> End:
        """Wait for the end. Afterwards the blocks are the engine's again, and nobody else touches them."""
        while self.end is None:
            await self._changed()
        return self.end

    def wake(self) -> None:
        """Something has changed; on the loop."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self) -> None:
        """An engine may wait a little while, again and again: who has gone is not kept."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


class OfferKeeper(Protocol):
    """What an Offer asks of its agent."""

    def ready(self, number: int, layers: int) -> None: ...

    def renew(self, number: int, ttl_s: float) -> str | None: ...

    def revoke(self, number: int, detail: str) -> None: ...


class LandingKeeper(Protocol):
    """What a Landing asks of its agent."""

    def cancel(self, number: int, detail: str) -> None: ...


class Offer(Handle):
    """KV that a sink may fetch once. `ticket`: ASCII; to be given to whom the sink hears from, or to nobody."""

    def __init__(self, keeper: OfferKeeper, number: int, name: str) -> None:
        super().__init__(number, name)
        self.ticket = ""
        self._keeper = keeper

    def ready(self, layers: int) -> None:
        """The first `layers` layers are computed and may leave."""
        self._keeper.ready(self.number, layers)

    def renew(self, ttl_s: float) -> bool:
        """Keep it for so long from now on (never for less than it has), with a new `ticket`; False: it is too late."""
        ticket = self._keeper.renew(self.number, ttl_s)
        self.ticket = ticket or self.ticket
        return ticket is not None

    def revoke(self, detail: str = "") -> None:
        """Take the blocks back, whoever reads them. It ends CANCELLED, unless it has ended."""
        self._keeper.revoke(self.number, detail)


class Landing(Handle):
    """KV on its way in. `layers`: so many, from the first on, are complete and verified; all are good once LANDED."""

    def __init__(self, keeper: LandingKeeper, number: int, name: str) -> None:
        super().__init__(number, name)
        self.layers = 0
        self._keeper = keeper

    async def reached(self, layers: int) -> bool:
        """Wait until so many layers are complete; False if it ended without."""
        while self.layers < layers and self.end is None:
            await self._changed()
        return self.layers >= layers

    def cancel(self, detail: str = "") -> None:
        """Give up. It ends CANCELLED once nobody writes any more, unless it has ended or is about to."""
        self._keeper.cancel(self.number, detail)
