"""Simulated duration of KV transfers at a given network speed.

The duration is computed from the size of the model's full KV, although mocks store fewer bytes.
"""

from __future__ import annotations

import asyncio
from math import inf


class PacedLink:
    """The simulated network link of one engine, which carries one transfer at a time.

    Other transfers wait for their turn. Times are in seconds of the event loop.
    """

    def __init__(self, token_bytes: int, bytes_s: float = inf, speed: float = 1.0) -> None:
        """Initialize an idle link with a rate of `bytes_s` bytes per second.

        token_bytes   KV bytes per token of the real model
        speed         speed-up of the mock's clock
        """
        self._token_s = token_bytes / bytes_s / speed
        self._free_at_s = 0.0

    async def transfer(self, tokens: int) -> None:
        """Wait as long as the transfer of `tokens` tokens of KV would take."""
        if not self._token_s:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + tokens * self._token_s
        await asyncio.sleep(self._free_at_s - now_s)
