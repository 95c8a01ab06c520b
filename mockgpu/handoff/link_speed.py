"""The duration of a transfer at a link speed, by the model's full KV, not the scaled bytes."""

from __future__ import annotations

import asyncio
from math import inf


class PacedLink:
    """One group's network link.

    Transfers share it one after the other, in the event loop's time.
    """

    def __init__(self, token_bytes: int, bytes_s: float = inf, speed: float = 1.0) -> None:
        """Set the rate. `token_bytes` is of the real model; `speed` is the mock's speed factor."""
        self._token_s = token_bytes / bytes_s / speed
        self._free_at_s = 0.0

    async def transfer(self, tokens: int) -> None:
        """Wait until the KV of `tokens` tokens would have been transferred."""
        if not self._token_s:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + tokens * self._token_s
        await asyncio.sleep(self._free_at_s - now_s)
