"""Endpoints by DNS: every address of a name is one, as behind a headless Service. Asked again and again, with jitter.

The system's resolver is asked, so that hosts files, search domains and its cache hold; it does not tell how long an
answer holds, hence the interval.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random

from gateway.config.tree import EndpointTraits
from gateway.discovery.source import Found, log, specs

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a name; OSError when there are none or nobody answers."""


async def resolve(name: str, port: int) -> Sequence[str]:
    """As the system sees it."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


class Dns:
    """One name. `sleep` is asyncio's."""

    def __init__(
        self,
        where: str,
        interval_s: float,
        traits: EndpointTraits,
        rng: Random,
        resolve: Resolve = resolve,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        host, _, port = where.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._interval_s, self._traits, self._rng = interval_s, traits, rng
        self._resolve, self._sleep = resolve, sleep

    async def watch(self) -> AsyncIterator[Found]:
        said: Found | None = None
        failing = False
        while True:
            try:
                addresses = await self._resolve(self._host, self._port)
            except OSError as error:
                if not failing:
                    log.warning("%s cannot be resolved, whom it last named stay: %s", self._host, error)
                failing = True
            else:
                failing = False
                found = specs([(address, self._port) for address in addresses], self._traits)
                if found and found != said:
                    said = found
                    yield found
            await self._sleep(self._interval_s * self._rng.uniform(0.8, 1.2))
