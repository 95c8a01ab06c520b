"""What a loopback TCP connection can do: one hot buffer of 1 MiB, sent and received over and over, no blocks at all.

The bytes are counted and the last buffer compared; there is nothing else to verify, which is why it is a ceiling and no
contestant.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
from pool import Bytes, Draw

BUFFER = 1 << 20


class Raw:
    """Source: sendall of the hot buffer; sink: a thread that receives into its own and answers one byte per order."""

    def __init__(self, role: str, pool_bytes: int) -> None:
        self.role = role
        self.pool: Bytes = np.zeros(pool_bytes, np.uint8)
        self.hot = memoryview(bytearray(BUFFER))
        self.what: Draw | None = None
        self.each = False
        self.listener = socket.create_server(("127.0.0.1", 0)) if role == "sink" else None
        self.wire: socket.socket | None = None
        self.thread: threading.Thread | None = None

    def address(self) -> dict[str, Any]:
        return {"port": self.listener.getsockname()[1]} if self.listener else {}

    def connect(self, peer: dict[str, Any]) -> None:
        if self.listener is None:
            self.wire = socket.create_connection(("127.0.0.1", peer["port"]))
            self._tune(self.wire)

    @staticmethod
    def _tune(wire: socket.socket) -> None:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)

    def prepare(self, what: Draw, each: bool) -> None:
        self.what, self.each = what, each

    def begin(self) -> None:
        if self.listener is not None:
            self.thread = threading.Thread(target=self._receive, daemon=True)
            self.thread.start()

    def finish(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _receive(self) -> None:
        assert self.listener is not None
        assert self.what is not None
        if self.wire is None:
            self.wire, _ = self.listener.accept()
            self._tune(self.wire)
        orders = len(self.what.src) if self.each else 1
        size = self.what.n_bytes // orders
        for _ in range(orders):
            left = size
            while left:
                left -= self.wire.recv_into(self.hot[: min(left, BUFFER)])
            self.wire.sendall(b"k")

    def run(self) -> None:
        assert self.wire is not None
        assert self.what is not None
        left = self.what.n_bytes
        while left:
            part = min(left, BUFFER)
            self.wire.sendall(self.hot[:part])
            left -= part
        self.wire.recv(1)

    def post(self, index: int) -> None:
        assert self.wire is not None
        assert self.what is not None
        self.wire.sendall(self.hot[: self.what.block_bytes])
        self.wire.recv(1)


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Raw:
    return Raw(role, pool_bytes)
