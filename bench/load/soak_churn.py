"""What breaks in a soak, one thing after the other: groups die, freeze, are drained, come and go; the file changes.

Lives here: breaking and mending. Behind every disturbance all is as before, and the gateway has said so.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

from bench.load.soak_house import Group, House, started

FROZEN_S = 8.0
NOTICED_S = 15.0
"""So long after a group broke, at most, streams that it owed something end: its silence has to be noticed."""


def available(told: dict[str, Any] | None) -> bool:
    return told is not None and bool(told["available"])


class Churn:
    """`done` counts disturbances by name. Each of the ways comes once before any comes again."""

    def __init__(self, house: House, speed: float, rng: Random) -> None:
        self.done: Counter[str] = Counter()
        self._house = house
        self._speed = speed
        self._rng = rng
        self._broke: list[tuple[str, float]] = []
        self._guests = 0

    def excuses(self, name: str, began: float, ended: float) -> bool:
        """Whether this group broke within that span (monotonic seconds), or shortly before."""
        return any(each == name and began - NOTICED_S < at < ended for each, at in self._broke)

    async def work(self, stop: asyncio.Event) -> None:
        """Until told to stop, and then to the mending of what is broken."""
        ways: list[Callable[[], Awaitable[None]]] = [
            *(
                self._killed_whole,
                self._killed_prefill,
                self._killed_decode,
                self._frozen,
                self._frozen_split,
            ),
            *(self._drained, self._came_and_went, self._changed, self._refused),
        ]
        while not stop.is_set():
            self._rng.shuffle(ways)
            for way in ways:
                await way()
                self.done[way.__name__.strip("_").replace("_", " ")] += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._rng.uniform(0.5, 2.0))
                if stop.is_set():
                    return

    def _any(self, *roles: str) -> Group:
        return self._rng.choice([each for each in self._house.groups if each.role in roles])

    async def _killed_whole(self) -> None:
        await self._killed(self._any("both"))

    async def _killed_prefill(self) -> None:
        await self._killed(self._any("prefill"))

    async def _killed_decode(self) -> None:
        await self._killed(self._any("decode"))

    async def _killed(self, group: Group) -> None:
        """SIGKILL, and another process on the same port."""
        self._broke.append((group.name, time.monotonic()))
        await asyncio.to_thread(group.mock.kill)
        await self._house.until(group, lambda told: not available(told))
        group.mock.start()
        await asyncio.to_thread(group.mock.ready)
        await self._house.until(group, available)

    async def _frozen(self) -> None:
        await self._stopped(self._any("both"))

    async def _frozen_split(self) -> None:
        await self._stopped(self._any("prefill", "decode"))

    async def _stopped(self, group: Group) -> None:
        """SIGSTOP for longer than the gateway waits, SIGCONT."""
        self._broke.append((group.name, time.monotonic()))
        group.mock.freeze()
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            group.mock.thaw()
        await self._house.until(group, available)

    async def _drained(self) -> None:
        """By hand, and back."""
        group = self._any("both", "prefill", "decode")
        await self._house.drain(group, "drain")
        await self._house.until(group, lambda told: told is not None and not told["in_flight"])
        await self._house.drain(group, "undrain")
        await self._house.until(group, available)

    async def _came_and_went(self) -> None:
        """A group that nobody knew, under a name that nobody had, by two reloads."""
        self._guests += 1
        role = self._rng.choice(("both", "prefill", "decode"))
        guest = started(f"guest-{self._guests}", role, self._speed)
        try:
            await asyncio.to_thread(guest.mock.ready)
            self._house.groups.append(guest)
            await self._house.reload()
            await self._house.until(guest, available)
            await asyncio.sleep(self._rng.uniform(1.0, 3.0))
            self._house.groups.remove(guest)
            await self._house.reload()
            await self._house.until(guest, lambda told: told is None)
        finally:
            await asyncio.to_thread(guest.mock.end)

    async def _changed(self) -> None:
        """Another policy, by a reload."""
        self._house.policy = (
            "least_loaded" if self._house.policy == "prefix_aware" else "prefix_aware"
        )
        await self._house.reload()

    async def _refused(self) -> None:
        """A file with a mistake, which changes nothing, and the right one again."""
        await self._house.reload(bad=True)
        self._house.policy = (
            "least_loaded" if self._house.policy == "prefix_aware" else "prefix_aware"
        )
        await self._house.reload()
