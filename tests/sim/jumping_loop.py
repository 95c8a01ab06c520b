"""An event loop whose clock jumps to the next timer, and a client that measures times on it."""

from __future__ import annotations

import asyncio
from typing import Any

from mockgpu.request_parser import ApiError


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        look = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            self._now += timeout or 0.0
            return look(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


class Stamps:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.tokens_s: list[float] = []
        self.ended_s = 0.0

    def on_token(self) -> None:
        self.tokens_s.append(self._loop.time())

    def on_end(self) -> None:
        self.ended_s = self._loop.time()

    def on_failure(self, error: ApiError) -> None:
        raise error
