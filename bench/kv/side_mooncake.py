"""KV benchmark: Mooncake's transfer engine over TCP.

Settings: op (READ or WRITE). Environment variables set the limits of its queues.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from block_memory import Bytes, Draw


class Mooncake:
    """One end of the benchmark's transfers by Mooncake's transfer engine over TCP.

    The process that does not start transfers only registers its memory. Mooncake's own threads
    serve it.
    """

    def __init__(self, role: str, pool_bytes: int, settings: dict[str, Any]) -> None:
        from mooncake.engine import TransferEngine

        self.op = settings["op"]
        self.initiates = role == ("source" if self.op == "WRITE" else "sink")
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError(
                "Mooncake's transfer engine failed to initialize its TCP transport at 127.0.0.1"
            )
        self.pool: Bytes = np.zeros(pool_bytes, np.uint8)
        self.base = self.pool.ctypes.data
        if self.engine.register_memory(self.base, pool_bytes) != 0:
            raise RuntimeError(
                f"Mooncake's transfer engine failed to register {pool_bytes} bytes of memory"
            )
        self.peer = ""
        self.peer_base = 0
        self.mine: list[int] = []
        self.theirs: list[int] = []
        self.sizes: list[int] = []

    def address(self) -> dict[str, Any]:
        return {"session": f"127.0.0.1:{self.engine.get_rpc_port()}", "base": self.base}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer, self.peer_base = peer["session"], peer["base"]

    def prepare(self, drawn: Draw, each: bool) -> None:
        mine, theirs = (drawn.src, drawn.dst) if self.op == "WRITE" else (drawn.dst, drawn.src)
        self.mine = (self.base + mine * drawn.block_bytes).tolist()
        self.theirs = (self.peer_base + theirs * drawn.block_bytes).tolist()
        self.sizes = [drawn.block_bytes] * len(self.mine)

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def run(self) -> None:
        batch = (
            self.engine.batch_transfer_sync_write
            if self.op == "WRITE"
            else self.engine.batch_transfer_sync_read
        )
        self._check(batch(self.peer, self.mine, self.theirs, self.sizes))

    def post(self, index: int) -> None:
        one = (
            self.engine.transfer_sync_write
            if self.op == "WRITE"
            else self.engine.transfer_sync_read
        )
        self._check(one(self.peer, self.mine[index], self.theirs[index], self.sizes[index]))

    @staticmethod
    def _check(rc: int) -> None:
        if rc != 0:
            raise RuntimeError(f"Mooncake's transfer failed with the error code {rc}")


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Mooncake:
    return Mooncake(role, pool_bytes, settings)
