"""Our transports at the level of a link: windows of runs as an agent would put them, generations checked, bytes proven.

The sink dials, as sinks do. The source puts a pass's windows and waits for the word that all have landed; it moves
its link meanwhile on its own thread. Settings: transport (tcp or shm), checked (xxh3), sealed (AES-GCM), lanes.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from pool import Bytes, Draw

from kvtransfer.contract import (
    Link,
    MultiLaneLink,
    Transport,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.layout.block_mapping import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transports.stream.link import LinkOptions
from kvtransfer.util.options import AgentOptions

BLOCK_BYTES = 64 << 10  # of the region, for its generations
SECRET = bytes(range(32))
PATIENCE_S = 50.0
ALL, ONE = b"all landed", b"one landed"
GRANT = b"grant"


class Ours:
    """Owner of one link. What the link tells arrives on its own thread, or on the one that drives it."""

    def __init__(self, role: str, pool_bytes: int, settings: dict[str, Any]) -> None:
        self.role = role
        self.region = _region(role, pool_bytes, settings["transport"])
        self.pool: Bytes = self.region.bytes
        self.transport = _transport(**settings)
        self.here = self.transport.start(self, [self.region])
        self.link: Link | None = None
        self.joined, self.granted, self.free = threading.Event(), threading.Event(), threading.Event()
        self.transfer = 0
        self.windows: list[tuple[WindowHead, WindowSlice]] = []
        self.expected: dict[int, WindowSlice] = {}
        self.left = 0
        self.counting = threading.Lock()
        self.lanes_left = settings.get("lanes", 1) - 1
        self.each = False
        self.replies = 0
        self.wrong = ""

    # ---- what the worker asks ----

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

    def prepare(self, what: Draw, each: bool) -> None:
        """The windows of both ends, and the sink's leave to write where they go."""
        self.transfer += 1
        self.each, self.replies = each, 0
        assert self.role == "sink" or self.joined.wait(PATIENCE_S)
        window_bytes = min(self.link.window_bytes, AgentOptions().window_bytes)  # type: ignore[union-attr]
        self.windows = self._windows(what, 1 if each else max(1, window_bytes // what.block_bytes))
        if self.role == "sink":
            self.expected = {head.first: window for head, window in self.windows}
            self.left = len(self.windows)
            assert self.link is not None
            blocks = _blocks(what.dst, what.block_bytes)
            self.link.send(GRANT + self.link.grant(self.transfer, [self.region], blocks))
        elif not self.granted.wait(PATIENCE_S):
            raise RuntimeError("the sink has granted nothing")
        self.granted.clear()

    def _windows(self, what: Draw, together: int) -> list[tuple[WindowHead, WindowSlice]]:
        size = what.block_bytes
        found = []
        for first in range(0, len(what.src), together):
            src, dst = what.src[first : first + together], what.dst[first : first + together]
            head = WindowHead(self.transfer, 0, 0, first, len(src), len(src) * size)
            runs = ByteRuns(src * size, dst * size, np.full(len(src), size, np.int64))
            found.append((head, WindowSlice(runs, self.region, 0, 0, self._current(src, size))))
        return found

    def _current(self, src: np.ndarray, size: int) -> Any:
        """What an agent has a link ask: whether the blocks are still of the generation that was promised."""
        if self.role == "sink":
            return None
        blocks = _blocks(src, size)
        promised = self.region.generations_of(blocks)
        return lambda: self.region.are_current(blocks, promised)

    def begin(self) -> None: ...

    def finish(self) -> None:
        if self.role == "sink":
            assert self.link is not None
            self.link.fence(self.transfer)
            if not self.free.wait(PATIENCE_S):
                raise RuntimeError("the fence does not close")
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
            raise RuntimeError("the sink does not answer")
        if self.wrong:
            raise RuntimeError(self.wrong)

    # ---- what the link tells (LinkOwner) ----

    def on_linked(self, link: Link) -> None:
        """Of connections the first is the link, and others are its lanes."""
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

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        if verdict is not WindowVerdict.OK:
            self.wrong = f"a window arrived {verdict}"
        with self.counting:  # lanes tell each on its own thread
            self.left -= 1
            last = not self.left
        if self.each:
            link.send(ONE)
        elif last:
            link.send(ALL)

    def on_sent(self, link: Link, head: WindowHead) -> None: ...

    def on_fenced(self, link: Link, transfer: int) -> None:
        self.free.set()

    def on_lost(self, link: Link, reason: str) -> None:
        self.wrong = f"the link is lost: {reason}"


def _region(role: str, pool_bytes: int, transport: str) -> Region:
    """Over tcp memory as everybody has it, numpy's with huge pages; shm needs memory files, which have none."""
    if transport == "tcp":
        return Region.over(np.zeros(pool_bytes, np.uint8), BLOCK_BYTES, name=role)
    return MemoryFileRegion.create(pool_bytes // BLOCK_BYTES, BLOCK_BYTES, name=role, populate=True)


def _laned(link: Link) -> MultiLaneLink:
    assert isinstance(link, MultiLaneLink)
    return link


def _transport(transport: str, checked: bool = False, sealed: bool = False, lanes: int = 1) -> Transport:
    manner = LinkOptions(checked=checked, sealed=sealed, lanes=lanes)
    if transport == "tcp":
        from kvtransfer.transports.tcp import Tcp

        return Tcp(manner=manner)
    from kvtransfer.transports.shm import Shm

    return Shm(manner=manner)


def _blocks(slots: np.ndarray, size: int) -> np.ndarray:
    """The region's blocks in which slots of this size lie."""
    return np.unique(slots[:, None] * size // BLOCK_BYTES + np.arange(max(1, size // BLOCK_BYTES)))


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Ours:
    return Ours(role, pool_bytes, settings)
