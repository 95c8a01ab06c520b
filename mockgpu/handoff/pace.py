"""How long a transfer takes on a link of a given speed, as the model's whole KV and not the scaled bytes that move."""

from __future__ import annotations

import asyncio
from math import inf


class Link:
    """One group's way to the others: transfers share it one after the other. On the event loop's time."""

    def __init__(self, token_bytes: int, bytes_s: float = inf, speed: float = 1.0) -> None:
        """`token_bytes` of KV per token of the real model; `speed`: how much faster than life the mock runs."""
        self._token_s = token_bytes / bytes_s / speed
        self._free_at_s = 0.0

    async def pass_by(self, tokens: int) -> None:
        """Return when the KV of that many tokens would have passed."""
        if not self._token_s:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + tokens * self._token_s
        await asyncio.sleep(self._free_at_s - now_s)
