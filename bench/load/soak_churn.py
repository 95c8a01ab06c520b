"""The faults of a soak test: engines that die, freeze or drain, and changes of the configuration.

Each fault ends when the gateway reports the normal state again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

from bench.load.soak_processes import Group, SoakFleet, start_group

FROZEN_S = 8.0
NOTICED_S = 15.0
"""Maximum seconds from an engine's failure until the gateway has detected it and ended its
streams.
"""


def is_available(status: dict[str, Any] | None) -> bool:
    return status is not None and bool(status["available"])


class Churn:
    """Causes faults in a running fleet until cancelled: engines die, freeze or drain, at random.

    done  number of faults by name
    """

    def __init__(self, fleet: SoakFleet, speed: float, rng: Random) -> None:
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._speed = speed
        self._rng = rng
        self._failures: list[tuple[str, float]] = []
        self._added = 0

    def excuses(self, name: str, started: float, ended: float) -> bool:
        """Return whether a wrong answer is excused: its engine failed meanwhile or shortly before.

        name     name of the engine
        started  beginning of the answer, in time.monotonic seconds
        ended    its end, in time.monotonic seconds
        """
        return any(
            broken == name and started - NOTICED_S < time_s < ended
            for broken, time_s in self._failures
        )

    async def work(self, stop: asyncio.Event) -> None:
        disturbances: list[Callable[[], Awaitable[None]]] = [
            *(
                self._kill_whole,
                self._kill_prefill,
                self._kill_decode,
                self._freeze_whole,
                self._freeze_split,
            ),
            *(self._drain, self._add_and_remove, self._change_policy, self._reload_invalid),
        ]
        while not stop.is_set():
            self._rng.shuffle(disturbances)
            for disturb in disturbances:
                await disturb()
                self.done[disturb.__name__.strip("_").replace("_", " ")] += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._rng.uniform(0.5, 2.0))
                if stop.is_set():
                    return

    def _pick_group(self, *roles: str) -> Group:
        return self._rng.choice([group for group in self._fleet.groups if group.role in roles])

    async def _kill_whole(self) -> None:
        await self._kill(self._pick_group("both"))

    async def _kill_prefill(self) -> None:
        await self._kill(self._pick_group("prefill"))

    async def _kill_decode(self) -> None:
        await self._kill(self._pick_group("decode"))

    async def _kill(self, group: Group) -> None:
        self._failures.append((group.name, time.monotonic()))
        await asyncio.to_thread(group.mock.kill)
        await self._fleet.wait_until(group, lambda status: not is_available(status))
        group.mock.start()
        await asyncio.to_thread(group.mock.wait_until_ready)
        await self._fleet.wait_until(group, is_available)

    async def _freeze_whole(self) -> None:
        await self._suspend(self._pick_group("both"))

    async def _freeze_split(self) -> None:
        await self._suspend(self._pick_group("prefill", "decode"))

    async def _suspend(self, group: Group) -> None:
        self._failures.append((group.name, time.monotonic()))
        group.mock.freeze()
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            group.mock.thaw()
        await self._fleet.wait_until(group, is_available)

    async def _drain(self) -> None:
        group = self._pick_group("both", "prefill", "decode")
        await self._fleet.drain(group, "drain")
        await self._fleet.wait_until(
            group, lambda status: status is not None and not status["in_flight"]
        )
        await self._fleet.drain(group, "undrain")
        await self._fleet.wait_until(group, is_available)

    async def _add_and_remove(self) -> None:
        self._added += 1
        role = self._rng.choice(("both", "prefill", "decode"))
        group = start_group(f"added-{self._added}", role, self._speed)
        try:
            await asyncio.to_thread(group.mock.wait_until_ready)
            self._fleet.groups.append(group)
            await self._fleet.reload()
            await self._fleet.wait_until(group, is_available)
            await asyncio.sleep(self._rng.uniform(1.0, 3.0))
            self._fleet.groups.remove(group)
            await self._fleet.reload()
            await self._fleet.wait_until(group, lambda status: status is None)
        finally:
            await asyncio.to_thread(group.mock.end)

    async def _change_policy(self) -> None:
        self._fleet.policy = (
            "least_loaded" if self._fleet.policy == "prefix_aware" else "prefix_aware"
        )
        await self._fleet.reload()

    async def _reload_invalid(self) -> None:
        # Reload an invalid file, which must change nothing, and then a valid one.
        await self._fleet.reload(bad=True)
        self._fleet.policy = (
            "least_loaded" if self._fleet.policy == "prefix_aware" else "prefix_aware"
        )
        await self._fleet.reload()
