"""KV benchmark: our transports without agents, in batches of blocks (windows) as agents send them.

The sink connects to the source. The source sends the windows from its own thread, and waits until
all are confirmed. The bytes and the generation (version number) of each block are checked.

Settings: transport (tcp or shm), checked (True for xxh3 digests), sealed (True for encryption with
AES-GCM), lanes (number of parallel connections), and other fields of LinkOptions.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from block_memory import Bytes, Draw

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import GenerationCheck, Region
from kvtransfer.transport_interface import (
    Link,
    MultiLaneLink,
    Transport,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.transports.stream.link_options import LinkOptions

BLOCK_BYTES = 64 << 10  # size of the region's blocks, which have generations
SECRET = bytes(range(32))
PATIENCE_S = 50.0
ALL, ONE = b"all landed", b"one landed"
GRANT = b"grant"


class LinkSide:
    """One end of the benchmark's transfers over one connection (link) of our own transports.

    Its callbacks run on the link's own thread, or on the thread that drives the link.
    """

    def __init__(self, role: str, pool_bytes: int, settings: dict[str, Any]) -> None:
        self.role = role
        self.region = _region(role, pool_bytes, settings["transport"])
        self.pool: Bytes = self.region.bytes
        self.transport = _transport(**settings)
        self.here = self.transport.start(self, [self.region])
        self.link: Link | None = None
        self.joined, self.granted, self.free = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.transfer = 0
        self.windows: list[tuple[WindowHead, WindowSlice]] = []
        self.expected: dict[int, WindowSlice] = {}
        self.left = 0
        self.counting = threading.Lock()
        self.lanes_left = settings.get("lanes", 1) - 1
        self.each = False
        self.replies = 0
        self.wrong = ""

    # ---- commands of the worker (Side) ----

    def address(self) -> dict[str, Any]:
        return {"address": self.here}

    def connect(self, peer: dict[str, Any]) -> None:
        if self.role == "sink":
            self.link = self.transport.dial(peer["address"])
            self.link.secure(SECRET)
            for _ in range(self.lanes_left):
                lane = self.transport.dial(peer["address"])
                lane.secure(SECRET)
                _laned(self.link).add_lane(lane)

    def prepare(self, drawn: Draw, each: bool) -> None:
        """Build the batches of blocks (windows) of one transfer, before its time is measured.

        drawn  the blocks to transfer
        each   whether every block gets its own window

        The sink permits writes to its blocks, and the source waits for the permission.
        """
        self.transfer += 1
        self.each, self.replies = each, 0
        assert self.role == "sink" or self.joined.wait(PATIENCE_S)
        window_bytes = self.link.window_bytes  # type: ignore[union-attr]
        self.windows = self._windows(
            drawn, 1 if each else max(1, window_bytes // drawn.block_bytes)
        )
        if self.role == "sink":
            self.expected = {head.first: window for head, window in self.windows}
            self.left = len(self.windows)
            assert self.link is not None
            blocks = _blocks(drawn.dst, drawn.block_bytes)
            self.link.send(GRANT + self.link.grant(self.transfer, [self.region], blocks))
        elif not self.granted.wait(PATIENCE_S):
            raise RuntimeError(f"the sink permitted no writes within {PATIENCE_S:g} s")
        self.granted.clear()

    def _windows(self, drawn: Draw, blocks_per_window: int) -> list[tuple[WindowHead, WindowSlice]]:
        size = drawn.block_bytes
        windows = []
        for first in range(0, len(drawn.src), blocks_per_window):
            src, dst = (
                drawn.src[first : first + blocks_per_window],
                drawn.dst[first : first + blocks_per_window],
            )
            head = WindowHead(self.transfer, 0, 0, first, len(src), len(src) * size)
            runs = ByteRuns(src * size, dst * size, np.full(len(src), size, np.int64))
            windows.append(
                (head, WindowSlice(runs, self.region, 0, 0, self._generation_check(src, size)))
            )
        return windows

    def _generation_check(self, src: np.ndarray, size: int) -> Any:
        if self.role == "sink":
            return None
        blocks = _blocks(src, size)
        promised = self.region.generations_of(blocks)
        return GenerationCheck(self.region, blocks, promised)

    def begin(self) -> None: ...

    def finish(self) -> None:
        if self.role == "sink":
            assert self.link is not None
            self.link.fence(self.transfer)
            if not self.free.wait(PATIENCE_S):
                raise RuntimeError(
                    "the fence, which stops late writes to the sink, was not confirmed within "
                    f"{PATIENCE_S:g} s"
                )
            self.free.clear()

    def run(self) -> None:
        assert self.link is not None
        for head, window in self.windows:
            self.link.put(head, window)
        self._await_replies(1)

    def post(self, index: int) -> None:
        assert self.link is not None
        self.link.put(*self.windows[index])
        self._await_replies(index + 1)

    def _await_replies(self, count: int) -> None:
        if not self.link.drive(lambda: self.replies >= count or bool(self.wrong), PATIENCE_S):  # type: ignore[union-attr]
            raise RuntimeError(
                f"the sink did not confirm the transferred blocks within {PATIENCE_S:g} s"
            )
        if self.wrong:
            raise RuntimeError(self.wrong)

    # ---- callbacks of the link (LinkOwner) ----

    def on_linked(self, link: Link) -> None:
        """Keep a new connection: the first is the link, later ones are parallel parts of it."""
        link.secure(SECRET)
        if self.link is None:
            self.link = link
        else:
            self.lanes_left -= 1
            _laned(self.link).add_lane(link)
        if not self.lanes_left:
            self.joined.set()

    def on_message(self, link: Link, data: bytes) -> None:
        if data.startswith(GRANT):
            link.accept(self.transfer, data[len(GRANT) :])
            self.granted.set()
        else:
            self.replies += 1

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        return self.expected.get(head.first)

    def following_windows(
        self, link: Link, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        index = bisect_left(self.windows, head.first, key=lambda window: window[0].first) + 1
        return self.windows[index : index + most]

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        if verdict is not WindowVerdict.OK:
            self.wrong = f"a window arrived with verdict {verdict}"
        with self.counting:  # each lane calls on its own thread
            self.left -= 1
            last = not self.left
        if self.each:
            link.send(ONE)
        elif last:
            link.send(ALL)

    def on_intact_windows(self, link: Link, heads: Sequence[WindowHead]) -> None:
        for head in heads:
            self.on_landed(link, head, WindowVerdict.OK)

    def on_sent(self, link: Link, head: WindowHead) -> None: ...

    def on_fenced(self, link: Link, transfer: int) -> None:
        self.free.set()

    def on_lost(self, link: Link, reason: str) -> None:
        self.wrong = f"the link is lost: {reason}"


def _region(role: str, pool_bytes: int, transport: str) -> Region:
    if transport == "tcp":
        return Region.over(np.zeros(pool_bytes, np.uint8), BLOCK_BYTES, name=role)
    return MemoryFileRegion.create(pool_bytes // BLOCK_BYTES, BLOCK_BYTES, name=role, populate=True)


def _laned(link: Link) -> MultiLaneLink:
    assert isinstance(link, MultiLaneLink)
    return link


def _transport(
    transport: str, checked: bool = False, sealed: bool = False, lanes: int = 1, **others: Any
) -> Transport:
    options = LinkOptions(checked=checked, sealed=sealed, lanes=lanes, **others)
    if transport == "tcp":
        from kvtransfer.transports.tcp import Tcp

        return Tcp(options=options)
    from kvtransfer.transports.shm import Shm

    return Shm(options=options)


def _blocks(slots: np.ndarray, size: int) -> np.ndarray:
    return np.unique(slots[:, None] * size // BLOCK_BYTES + np.arange(max(1, size // BLOCK_BYTES)))


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> LinkSide:
    return LinkSide(role, pool_bytes, settings)
