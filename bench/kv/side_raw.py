"""What a loopback TCP connection can do: one hot buffer of 1 MiB, sent and received over and over, no blocks at all.

The bytes are counted; there is nothing else to verify, which is why it is a ceiling and no contestant. `Scattered` is
the other ceiling: the blocks themselves by the shortest of loops, without frames, generations or leave to write.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import numpy as np
import xxhash
from pool import Bytes, Draw

BUFFER = 1 << 20
AT_ONCE = 512 << 10  # of blocks in one call: the digest is taken while they are in a core's cache
PROOF = 8


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

    def _accepted(self) -> socket.socket:
        """The sink's end of the wire."""
        assert self.listener is not None
        if self.wire is None:
            self.wire, _ = self.listener.accept()
            self._tune(self.wire)
        return self.wire

    def _receive(self) -> None:
        assert self.what is not None
        wire = self._accepted()
        orders = len(self.what.src) if self.each else 1
        size = self.what.n_bytes // orders
        for _ in range(orders):
            left = size
            while left:
                left -= wire.recv_into(self.hot[: min(left, BUFFER)])
            wire.sendall(b"k")

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


class Scattered(Raw):
    """The same wire, from the slots of one pool to those of the other; checked: with an xxh3-64 for every few blocks,
    taken from the source's memory and again from the sink's."""

    def __init__(self, role: str, pool_bytes: int, *, checked: bool) -> None:
        super().__init__(role, pool_bytes)
        self.checked = checked
        self.groups: list[list[memoryview]] = []

    def prepare(self, what: Draw, each: bool) -> None:
        super().prepare(what, each)
        memory, size = self.pool.data, what.block_bytes
        slots = (what.src if self.role == "source" else what.dst).tolist()
        blocks = [memory[slot * size : (slot + 1) * size] for slot in slots]
        together = 1 if each else max(1, AT_ONCE // size)
        self.groups = [blocks[at : at + together] for at in range(0, len(blocks), together)]

    def _receive(self) -> None:
        wire, proof = self._accepted(), bytearray(PROOF)
        for blocks in self.groups:
            _whole(os.readv, wire, [*blocks, memoryview(proof)] if self.checked else blocks)
            if self.checked and _digest(blocks) != proof:
                raise RuntimeError("bytes were spoiled")
            if self.each:
                wire.sendall(b"k")
        if not self.each:
            wire.sendall(b"k")

    def run(self) -> None:
        assert self.wire is not None
        for blocks in self.groups:
            self._send(blocks)
        self.wire.recv(1)

    def post(self, index: int) -> None:
        assert self.wire is not None
        self._send(self.groups[index])
        self.wire.recv(1)

    def _send(self, blocks: list[memoryview]) -> None:
        assert self.wire is not None
        _whole(
            os.writev, self.wire, [*blocks, memoryview(_digest(blocks))] if self.checked else blocks
        )


def _digest(blocks: list[memoryview]) -> bytes:
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(block)
    return digest.digest()


def _whole(call: Any, wire: socket.socket, parts: list[memoryview]) -> None:
    """readv or writev until all of it is through."""
    while parts:
        count = call(wire.fileno(), parts)
        if not count:
            raise EOFError("the other end has gone")
        through = 0
        while through < len(parts) and count >= len(parts[through]):
            count -= len(parts[through])
            through += 1
        parts = parts[through:]
        if count:
            parts[0] = parts[0][count:]


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Raw:
    if settings.get("scattered"):
        return Scattered(role, pool_bytes, checked=settings.get("checked", False))
    return Raw(role, pool_bytes)
