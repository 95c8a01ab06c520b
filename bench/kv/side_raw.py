"""KV benchmark: plain TCP over loopback, as an upper limit for the transports.

Raw        sends the same buffer of 1 MiB repeatedly; the buffer stays in the processor's cache
Scattered  sends scattered blocks in a minimal loop, without framing or checks
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import numpy as np
import xxhash
from block_memory import Bytes, Draw

BUFFER = 1 << 20
AT_ONCE = 512 << 10
"""Number of bytes that one system call moves.

So few bytes are still in a core's cache when their digest is computed.
"""

PROOF = 8


class Raw:
    """KV benchmark over plain TCP: a source sends one buffer repeatedly, and a sink confirms it."""

    def __init__(self, role: str, pool_bytes: int) -> None:
        self.role = role
        self.pool: Bytes = np.zeros(pool_bytes, np.uint8)
        self.buffer = memoryview(bytearray(BUFFER))
        self.drawn: Draw | None = None
        self.each = False
        self.listener = socket.create_server(("127.0.0.1", 0)) if role == "sink" else None
        self.sock: socket.socket | None = None
        self.thread: threading.Thread | None = None

    def address(self) -> dict[str, Any]:
        return {"port": self.listener.getsockname()[1]} if self.listener else {}

    def connect(self, peer: dict[str, Any]) -> None:
        if self.listener is None:
            self.sock = socket.create_connection(("127.0.0.1", peer["port"]))
            self._tune(self.sock)

    @staticmethod
    def _tune(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)

    def prepare(self, drawn: Draw, each: bool) -> None:
        self.drawn, self.each = drawn, each

    def begin(self) -> None:
        if self.listener is not None:
            self.thread = threading.Thread(target=self._receive, daemon=True)
            self.thread.start()

    def finish(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _accept(self) -> socket.socket:
        assert self.listener is not None
        if self.sock is None:
            self.sock, _ = self.listener.accept()
            self._tune(self.sock)
        return self.sock

    def _receive(self) -> None:
        assert self.drawn is not None
        sock = self._accept()
        transfers = len(self.drawn.src) if self.each else 1
        size = self.drawn.n_bytes // transfers
        for _ in range(transfers):
            left = size
            while left:
                left -= sock.recv_into(self.buffer[: min(left, BUFFER)])
            sock.sendall(b"k")

    def run(self) -> None:
        assert self.sock is not None
        assert self.drawn is not None
        left = self.drawn.n_bytes
        while left:
            part = min(left, BUFFER)
            self.sock.sendall(self.buffer[:part])
            left -= part
        self.sock.recv(1)

    def post(self, index: int) -> None:
        assert self.sock is not None
        assert self.drawn is not None
        self.sock.sendall(self.buffer[: self.drawn.block_bytes])
        self.sock.recv(1)


class Scattered(Raw):
    """KV benchmark over plain TCP: a source sends scattered blocks, which a sink stores scattered.

    checked  whether an xxh3-64 digest is sent after every few blocks and verified by the sink
    """

    def __init__(self, role: str, pool_bytes: int, *, checked: bool) -> None:
        super().__init__(role, pool_bytes)
        self.checked = checked
        self.groups: list[list[memoryview]] = []

    def prepare(self, drawn: Draw, each: bool) -> None:
        super().prepare(drawn, each)
        memory, size = self.pool.data, drawn.block_bytes
        slots = (drawn.src if self.role == "source" else drawn.dst).tolist()
        blocks = [memory[slot * size : (slot + 1) * size] for slot in slots]
        group_size = 1 if each else max(1, AT_ONCE // size)
        starts = range(0, len(blocks), group_size)
        self.groups = [blocks[start : start + group_size] for start in starts]

    def _receive(self) -> None:
        sock, proof = self._accept(), bytearray(PROOF)
        for blocks in self.groups:
            _transfer_all(os.readv, sock, [*blocks, memoryview(proof)] if self.checked else blocks)
            if self.checked and _digest(blocks) != proof:
                raise RuntimeError(
                    "the digest of the received blocks differs from that of the sent ones"
                )
            if self.each:
                sock.sendall(b"k")
        if not self.each:
            sock.sendall(b"k")

    def run(self) -> None:
        assert self.sock is not None
        for blocks in self.groups:
            self._send(blocks)
        self.sock.recv(1)

    def post(self, index: int) -> None:
        assert self.sock is not None
        self._send(self.groups[index])
        self.sock.recv(1)

    def _send(self, blocks: list[memoryview]) -> None:
        assert self.sock is not None
        _transfer_all(
            os.writev, self.sock, [*blocks, memoryview(_digest(blocks))] if self.checked else blocks
        )


def _digest(blocks: list[memoryview]) -> bytes:
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(block)
    return digest.digest()


def _transfer_all(call: Any, sock: socket.socket, parts: list[memoryview]) -> None:
    while parts:
        count = call(sock.fileno(), parts)
        if not count:
            raise EOFError("the other process closed the connection during a transfer")
        complete = 0
        while complete < len(parts) and count >= len(parts[complete]):
            count -= len(parts[complete])
            complete += 1
        parts = parts[complete:]
        if count:
            parts[0] = parts[0][count:]


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Raw:
    if settings.get("scattered"):
        return Scattered(role, pool_bytes, checked=settings.get("checked", False))
    return Raw(role, pool_bytes)
