"""Makes KV transfers of mock engines as slow as those of real engines over a given network.

A mock stores and sends fewer bytes than a real engine. The simulated duration is that of the real
model's KV.
"""

from __future__ import annotations

import asyncio
from math import inf


class PacedLink:
    """The simulated network connection of one engine, over which one KV transfer moves at a time.

    A second transfer waits until the first one has ended. Times are in seconds of the event loop.
    """

    def __init__(self, token_bytes: int, bytes_s: float = inf, speed: float = 1.0) -> None:
        """Create an idle link that carries `bytes_s` bytes per second.

        token_bytes   KV bytes per token of the real model
        speed         factor by which simulated time is faster than real time
        """
        self._token_s = token_bytes / bytes_s / speed
        self._free_at_s = 0.0

    async def transfer(self, tokens: int) -> None:
        """Wait as long as the KV of `tokens` tokens takes to move over this connection."""
        if not self._token_s:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + tokens * self._token_s
        await asyncio.sleep(self._free_at_s - now_s)
