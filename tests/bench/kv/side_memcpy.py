"""The floor: numpy copies block after block inside one process. The other process has nothing to do."""

from __future__ import annotations

from typing import Any

import numpy as np
from pool import Bytes, Draw


class Memcpy:
    """The sink copies from a private pool of its own; what that holds is the source's reference."""

    def __init__(self, role: str, pool_bytes: int) -> None:
        self.role = role
        self.pool: Bytes = np.zeros(pool_bytes, np.uint8)
        self.source: Bytes = np.zeros(pool_bytes if role == "sink" else 0, np.uint8)
        self.pairs: list[tuple[Bytes, Bytes]] = []

    def address(self) -> dict[str, Any]:
        return {}

    def connect(self, peer: dict[str, Any]) -> None:
        """The sink gets the source's bytes here, ahead of every measurement."""
        if self.role == "sink":
            self.source[:] = np.memmap(peer["expected"], dtype=np.uint8, mode="r")

    def prepare(self, what: Draw, each: bool) -> None:
        if self.role == "sink":
            to, out_of = self.pool.reshape(-1, what.block_bytes), self.source.reshape(-1, what.block_bytes)
            self.pairs = [(to[d], out_of[s]) for s, d in zip(what.src.tolist(), what.dst.tolist(), strict=True)]

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def run(self) -> None:
        for to, out_of in self.pairs:
            to[:] = out_of

    def post(self, index: int) -> None:
        to, out_of = self.pairs[index]
        to[:] = out_of


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Memcpy:
    return Memcpy(role, pool_bytes)
