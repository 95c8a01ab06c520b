"""Checks that new endpoints can be reached before a configuration is applied.

It selects the pools to check, and opens a TCP connection to their endpoints. reloader.py handles a
failed check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Set
from contextlib import suppress
from urllib.parse import urlsplit

from gateway.config import Config
from gateway.http.connect_errors import is_process_error

CONNECT_S = 1.0
MAX_CONNECTS = 64


async def find_unreachable_pool(config: Config, known: Set[str], available: Set[str]) -> str | None:
    """Return the first pool whose endpoints the change makes unreachable; None if there is none.

    A pool is skipped if it has no new endpoint, if one of its endpoints is available, or if it uses
    service discovery.

    known      URLs of the endpoints in the current configuration
    available  URLs of the endpoints that get requests now
    """
    for name, pool in config.pools.items():
        urls = {endpoint.url for endpoint in pool.endpoints}
        if pool.discover is not None or urls <= known or urls & available:
            continue
        if not await _any_reachable(sorted(urls)):
            return name
    return None


async def _any_reachable(urls: Iterable[str]) -> bool:
    limit = asyncio.Semaphore(MAX_CONNECTS)

    async def is_reachable(url: str) -> bool:
        async with limit:
            return await _connects(url)

    tasks = [asyncio.ensure_future(is_reachable(url)) for url in urls]
    try:
        for attempt in asyncio.as_completed(tasks):
            if await attempt:
                return True
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _connects(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError) as error:
        # Without descriptors in this process, nothing is known of the endpoint.
        return is_process_error(error)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
