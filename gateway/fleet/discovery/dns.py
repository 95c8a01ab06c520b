"""Discovery by DNS: each address of a host name is one endpoint.

This fits a headless Service of Kubernetes, whose name resolves to the addresses of its pods. The
name is looked up at fixed intervals with jitter, because the system's resolver reports no TTL. The
resolver also reads hosts files, search domains and its own cache.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random

from gateway.config.endpoint_sections import EndpointTraits
from gateway.fleet.discovery.source_interface import DiscoveredEndpoints, log, specs_for

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function that returns the addresses of a host name.

It raises OSError when there are none or no DNS server responds.
"""


async def resolve(name: str, port: int) -> Sequence[str]:
    """Return the addresses of a host name, looked up with the system's resolver.

    Raises OSError if the name has no address or no DNS server responds.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in addresses]


class DnsSource:
    """A discovery source that looks up one host name in DNS."""

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

    async def watch(self) -> AsyncIterator[DiscoveredEndpoints]:
        yielded: DiscoveredEndpoints | None = None
        is_failing = False
        while True:
            try:
                addresses = await self._resolve(self._host, self._port)
            except OSError as error:
                if not is_failing:
                    log.warning(
                        "service discovery: %s cannot be resolved, so its last known endpoints "
                        "stay: %s",
                        self._host,
                        error,
                    )
                is_failing = True
            else:
                is_failing = False
                endpoints = specs_for(
                    [(address, self._port) for address in addresses], self._traits
                )
                if endpoints and endpoints != yielded:
                    yielded = endpoints
                    yield endpoints
            await self._sleep(self._interval_s * self._rng.uniform(0.8, 1.2))
