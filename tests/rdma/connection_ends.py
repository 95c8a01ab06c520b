"""Opens both ends of an RDMA connection, records their events, and transfers KV between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.transport_interface import Link, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.rdma.link import RdmaOptions
from kvtransfer.transports.rdma.transport import Rdma

BLOCK = 4096
PATIENCE_S = 20.0


class RecordingOwner:
    """An owner of an RDMA connection that records the connection's events.

    heard      the events, in order
    expecting  by transfer: function that returns where to write an arriving window (piece of KV)
    """

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.expecting: dict[int, Callable[[WindowHead], WindowSlice | None]] = {}
        self.links: list[Link] = []
        self._news = threading.Condition()

    def on_linked(self, link: Link) -> None:
        self.links.append(link)
        self._note("linked")

    def on_message(self, link: Link, data: bytes) -> None:
        self._note("message", data)

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        wanted = self.expecting.get(head.transfer)
        return wanted(head) if wanted is not None else None

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        self._note("landed", head.transfer, head.first, verdict)

    def on_sent(self, link: Link, head: WindowHead) -> None:
        self._note("sent", head.transfer, head.first)

    def on_fenced(self, link: Link, transfer: int) -> None:
        self._note("fenced", transfer)

    def on_lost(self, link: Link, reason: str) -> None:
        self._note("lost", reason)

    def _note(self, *what: Any) -> None:
        with self._news:
            self.heard.append(what)
            self._news.notify_all()

    def count(self, *what: Any) -> int:
        return sum(event[: len(what)] == what for event in self.heard)

    def wait(self, *what: Any, times: int = 1) -> None:
        with self._news:
            done = self._news.wait_for(lambda: self.count(*what) >= times, PATIENCE_S)
        assert done, f"waited for {times} of {what}, heard {self.heard}"


class LinkedEnds:
    """Both ends of an RDMA connection, which the sink (receiver) has opened.

    near  the sink's end
    far   the source's end
    """

    def __init__(
        self,
        blocks: int = 64,
        options: RdmaOptions | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        rng = rng or np.random.default_rng(1)
        self.source, self.sink = RecordingOwner(), RecordingOwner()
        self.memory = MemoryFileRegion.create(blocks, BLOCK, name="source")
        self.memory.bytes[:] = rng.integers(1, 256, self.memory.bytes.size, np.uint8)
        self.place = MemoryFileRegion.create(blocks, BLOCK, name="sink")
        self.transports = Rdma(options=options), Rdma(options=options)
        address = self.transports[0].start(self.source, [self.memory])
        self.transports[1].start(self.sink, [self.place])
        self.near = self.transports[1].dial(address)
        self.source.wait("linked")
        self.far = self.source.links[0]
        for end in (self.near, self.far):
            end.secure(bytes(32))

    def reserve(self, transfer: int, pieces: ByteRuns, blocks: Sequence[int]) -> None:
        grant = self.near.grant(transfer, [self.place], blocks)
        self.sink.expecting[transfer] = lambda head: WindowSlice(
            pieces.cut(head.first, head.count), self.place, 0, 0
        )
        self.far.accept(transfer, grant)

    def put(
        self,
        transfer: int,
        pieces: ByteRuns,
        first: int,
        count: int,
        current: Callable[[], bool] | None = None,
    ) -> None:
        cut = pieces.cut(first, count)
        head = WindowHead(transfer, 0, 0, first, count, cut.n_bytes)
        self.far.put(head, WindowSlice(cut, self.memory, 0, 0, current))

    def arrived(self, pieces: ByteRuns) -> bool:
        wanted = np.zeros_like(self.place.bytes)
        for src, dst, length in zip(
            pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist(), strict=True
        ):
            wanted[dst : dst + length] = self.memory.bytes[src : src + length]
        return bool((wanted == self.place.bytes).all())

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        for region in (self.memory, self.place):
            region.close()


def runs(src_blocks: Sequence[int], dst_blocks: Sequence[int], length: int = BLOCK) -> ByteRuns:
    src, dst = (np.asarray(blocks, np.int64) * BLOCK for blocks in (src_blocks, dst_blocks))
    return ByteRuns(src, dst, np.full(src.size, length, np.int64))
