"""A test helper: one direction of a connection between KV agents, without threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.frame import FrameKind, FrameLimits
from kvtransfer.transport_interface import WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.pump import PumpCalls, PumpFunctions
from kvtransfer.transports.stream.inbound import Inbound
from kvtransfer.transports.stream.outbound import Outbound

BLOCKS, BLOCK_BYTES = 32, 16 << 10
SIZE = BLOCKS * BLOCK_BYTES
TRUSTED = FrameLimits(header_bytes=4 << 20)
KEY = bytes(range(32))

current_pump: PumpFunctions | None = None
"""The native pump that moves the bytes of a pipe; None: they are moved by Python code."""


@dataclass
class RecordingInboundListener:
    places: dict[WindowHead, WindowSlice] = field(default_factory=dict)
    heard: list[tuple[object, object]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """The number of windows in each report of several."""

    def on_frame(self, kind: FrameKind, header: bytes) -> None:
        self.heard.append((kind, header))

    def place_window(self, head: WindowHead) -> WindowSlice | None:
        return self.places.get(head)

    def following_windows(
        self, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        known = [(head, place) for head, place in self.places.items() if place is not None]
        index = next((i for i, (known_head, _) in enumerate(known) if known_head == head), 0)
        return known[index + 1 : index + 1 + most]

    def on_intact_windows(self, heads: Sequence[WindowHead]) -> None:
        self.batches.append(len(heads))
        for head in heads:
            self.on_landed(head, WindowVerdict.OK)

    def on_landed(self, head: WindowHead, verdict: WindowVerdict) -> None:
        self.heard.append((head, verdict))


@dataclass
class Pipe:
    out: Outbound
    inn: Inbound
    ear: RecordingInboundListener
    near: socket.socket
    far: socket.socket
    source: Region
    sink: Region
    sent: list[WindowHead]

    def put(
        self,
        runs: ByteRuns,
        transfer: int = 1,
        first: int = 0,
        current: Callable[[], bool] | None = None,
    ) -> WindowHead:
        head = WindowHead(transfer, 0, 0, first, runs.count, runs.n_bytes)
        self.ear.places[head] = WindowSlice(runs, self.sink, 0, 0)
        self.out.enqueue((head, WindowSlice(runs, self.source, 0, 0, current)))
        return head

    def receive(self) -> None:
        while self.inn.receive_available():
            pass

    def flow(self) -> None:
        while not self.out.is_idle:
            self.out.send_available()
            self.receive()
        self.receive()

    def expected(self, *moves: ByteRuns) -> np.ndarray:
        memory = np.zeros(SIZE, np.uint8)
        for runs in moves:
            for src, dst, length in zip(runs.src, runs.dst, runs.length, strict=True):
                memory[dst : dst + length] = self.source.bytes[src : src + length]
        return memory


@contextmanager
def pipe(*, checked: bool = True) -> Iterator[Pipe]:
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
    ear, sent = RecordingInboundListener(), list[WindowHead]()
    source = MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name="source")
    source.bytes[:] = np.random.default_rng(1).integers(1, 256, SIZE, dtype=np.uint8)
    sink = MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name="sink")
    bell = os.eventfd(0)
    pump = current_pump
    writing = PumpCalls(pump, near.fileno(), bell, is_writing=True) if pump else None
    reading = PumpCalls(pump, far.fileno(), bell) if pump else None
    out = Outbound(near.fileno(), sent.append, checked=checked, calls=writing)
    inn = Inbound(far.fileno(), far.recv_into, ear, TRUSTED, reading)
    try:
        yield Pipe(out, inn, ear, near, far, source, sink, sent)
    finally:
        os.close(bell)
        near.close()
        far.close()
        source.close()
        sink.close()


def scattered(seed: int, count: int, longest: int) -> ByteRuns:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SIZE // longest)[:count] * longest
    return ByteRuns(
        rng.integers(0, SIZE - longest, count), slots, rng.integers(1, longest + 1, count)
    )
