"""KV benchmark: copies memory with numpy, as a reference for the transports.

The sink process copies from a pool of its own; the source process is idle.

Settings: files (True to use memory files instead of numpy's memory, which has huge pages).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from block_memory import Bytes, Draw


class Memcpy:
    """One end of the fastest possible transfer: the sink only copies memory.

    The sink copies from a private pool with the same content as the source's.
    """

    def __init__(self, role: str, pool_bytes: int, make: Callable[[int], Bytes]) -> None:
        self.role = role
        self.pool = make(pool_bytes)
        self.source = make(pool_bytes if role == "sink" else 8)
        self.pairs: list[tuple[Bytes, Bytes]] = []

    def address(self) -> dict[str, Any]:
        return {}

    def connect(self, peer: dict[str, Any]) -> None:
        if self.role == "sink":
            self.source[:] = np.memmap(peer["expected"], dtype=np.uint8, mode="r")

    def prepare(self, drawn: Draw, each: bool) -> None:
        if self.role == "sink":
            to, out_of = (
                self.pool.reshape(-1, drawn.block_bytes),
                self.source.reshape(-1, drawn.block_bytes),
            )
            self.pairs = [
                (to[d], out_of[s])
                for s, d in zip(drawn.src.tolist(), drawn.dst.tolist(), strict=True)
            ]

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def run(self) -> None:
        for to, out_of in self.pairs:
            to[:] = out_of

    def post(self, index: int) -> None:
        to, out_of = self.pairs[index]
        to[:] = out_of


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Memcpy:
    return Memcpy(role, pool_bytes, _file if settings.get("files") else _huge)


def _huge(n_bytes: int) -> Bytes:
    return np.zeros(n_bytes, np.uint8)


def _file(n_bytes: int) -> Bytes:
    fd = os.memfd_create("memcpy")
    os.ftruncate(fd, n_bytes)
    return np.frombuffer(
        mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8
    )
