"""Opens both ends of a connection (link) over any KV transport, and records the link's events.

The environment variable PENSTOCK_KV_TRANSPORTS lists the transports to test. The default is all but
rdma, which needs a device. Besides the real transports, there are variants of tcp:

lanes        with three parallel connections per link
tls          with certificates
tls-lanes    with both
tcp-python   without the native pump (C code)
batches      as in tests/chaos/kv_trials.py
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import (
    Link,
    MultiLaneLink,
    Transport,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.transports.inproc import Inproc, InprocWire
from kvtransfer.util.clock import ThreadClock

if TYPE_CHECKING:
    from kvtransfer.util.tls_files import TlsFiles

TRANSPORTS = os.environ.get("PENSTOCK_KV_TRANSPORTS", "inproc,shm,tcp,tcp-python,lanes,tls").split(
    ","
)
OVER_TCP = ("tcp", "tcp-python", "batches", "lanes", "tls", "tls-lanes")
BLOCKS, BLOCK_BYTES = 64, 32 << 10
LANES = 3
# Timeout for events that must happen, longer on an emulated processor.
PATIENCE_S = float(os.environ.get("PENSTOCK_PATIENCE_S", "20"))


@contextmanager
def transports(name: str, count: int = 2) -> Iterator[list[Transport]]:
    clock = ThreadClock()
    wire = InprocWire(clock)
    created = [make(name, wire) for _ in range(count)]
    try:
        yield created
    finally:
        for transport in created:
            transport.close()
        clock.close()


def make(name: str, wire: InprocWire, pace: float = 1.0) -> Transport:
    # Return a transport by name, for a machine that is `pace` times as slow.
    #
    # Its module is imported only when needed.
    if name == "inproc":
        return Inproc(wire)
    if name in OVER_TCP:
        from kvtransfer.transports.stream.link_options import LinkOptions
        from kvtransfer.transports.tcp import Tcp

        files = tls_files() if name.startswith("tls") else None
        lanes = LANES if name.endswith("lanes") else 1
        return Tcp(options=LinkOptions(lanes=lanes, native=name != "tcp-python"), tls=files)
    if name == "shm":
        from kvtransfer.transports.shm import Shm

        return Shm()
    if name == "rdma":
        from kvtransfer.transports.rdma.link import RdmaOptions
        from kvtransfer.transports.rdma.transport import Rdma

        return Rdma(options=RdmaOptions(setup_s=max(RdmaOptions().setup_s, 1.25 * pace)))
    raise ValueError(f"there is no KV transport named {name}; correct PENSTOCK_KV_TRANSPORTS")


_MAKING = threading.Lock()


def _remove(directory: str, owner: int) -> None:
    # Remove the directory when process `owner` ends, but not in a forked child.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


@cache
def tls_files() -> TlsFiles:
    from kvtransfer.util.tls_files import TlsFiles
    from tests.certificate_authority import Authority

    with _MAKING:  # trials run in threads
        directory = os.environ.get("PENSTOCK_TEST_TLS")
        if directory is None:
            directory = tempfile.mkdtemp(prefix="penstock-tls-")
            atexit.register(_remove, directory, os.getpid())
            Authority(Path(directory)).issue("agent", "127.0.0.1", "localhost")
            os.environ["PENSTOCK_TEST_TLS"] = directory
    certificate, key, ca = (f"{directory}/{name}" for name in ("agent.pem", "agent.key", "ca.pem"))
    return TlsFiles(certificate=certificate, key=key, ca=ca)


def kind_of(name: str) -> str:
    return "tcp" if name in OVER_TCP else name


@dataclass
class OwnerEvent:
    kind: str
    link: Link
    what: object


@dataclass
class Owner:
    place: Callable[[WindowHead], WindowSlice | None] = lambda head: None
    forecast: Callable[[WindowHead, int], list[tuple[WindowHead, WindowSlice]]] = (
        lambda head, most: []
    )
    heard: list[OwnerEvent] = field(default_factory=list)
    bell: threading.Condition = field(default_factory=threading.Condition)

    def note(self, kind: str, link: Link, what: object = None) -> None:
        with self.bell:
            self.heard.append(OwnerEvent(kind, link, what))
            self.bell.notify_all()

    def on_linked(self, link: Link) -> None:
        self.note("linked", link)

    def on_message(self, link: Link, data: bytes) -> None:
        self.note("message", link, bytes(data))

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        self.note("incoming", link, head)
        return self.place(head)

    def following_windows(
        self, link: Link, head: WindowHead, most: int
    ) -> list[tuple[WindowHead, WindowSlice]]:
        return self.forecast(head, most)

    def on_intact_windows(self, link: Link, heads: Sequence[WindowHead]) -> None:
        for head in heads:
            self.on_landed(link, head, WindowVerdict.OK)

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        self.note("landed", link, (head, verdict))

    def on_sent(self, link: Link, head: WindowHead) -> None:
        self.note("sent", link, head)

    def on_fenced(self, link: Link, transfer: int) -> None:
        self.note("fenced", link, transfer)

    def on_lost(self, link: Link, reason: str) -> None:
        self.note("lost", link, reason)

    def all(self, kind: str, link: Link | None = None) -> list[object]:
        with self.bell:
            return [
                heard.what
                for heard in self.heard
                if heard.kind == kind and link in (None, heard.link)
            ]

    def wait(self, kind: str, count: int = 1) -> list[object]:
        # Wait for `count` events of a kind and return them. Raises AssertionError on a timeout.
        deadline = time.monotonic() + PATIENCE_S
        with self.bell:
            while sum(heard.kind == kind for heard in self.heard) < count:
                left = deadline - time.monotonic()
                assert left > 0, (
                    f"{kind} was not heard {count} times but {[event.kind for event in self.heard]}"
                )
                self.bell.wait(left)
        return self.all(kind)[:count]


def until(holds: Callable[[], object]) -> None:
    # Wait for a condition that other threads fulfil. Raises AssertionError on a timeout.
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@dataclass
class Pair:
    """Two agents' ends of one connection (link), for tests.

    `sink` has connected to `source`. Each has one region of BLOCKS blocks.
    """

    name: str
    sink: Link
    source: Link
    sink_owner: Owner
    source_owner: Owner
    sink_region: Region
    source_region: Region
    sink_transport: Transport
    source_transport: Transport

    def admit(self, transfer: int) -> None:
        grant = self.sink.grant(transfer, [self.sink_region], np.arange(BLOCKS))
        self.source.accept(transfer, grant)

    def expect(self, windows: dict[WindowHead, ByteRuns]) -> None:
        left = dict(windows)

        def place(head: WindowHead) -> WindowSlice | None:
            runs = left.pop(head, None)
            return None if runs is None else WindowSlice(runs, self.sink_region, 0, 0)

        def forecast(head: WindowHead, most: int) -> list[tuple[WindowHead, WindowSlice]]:
            heads = list(windows)
            following = heads[heads.index(head) + 1 :][:most]
            return [
                (after, WindowSlice(windows[after], self.sink_region, 0, 0)) for after in following
            ]

        self.sink_owner.place, self.sink_owner.forecast = place, forecast

    def put(
        self, head: WindowHead, runs: ByteRuns, current: Callable[[], bool] | None = None
    ) -> None:
        self.source.put(
            head, WindowSlice(runs, self.source_region, 0, 0, current or (lambda: True))
        )


@contextmanager
def linked_pair(name: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Pair]:
    # Yield two started transports with a link; the source's memory is random.
    sink_region = MemoryFileRegion.create(BLOCKS, block_bytes, name="into")
    source_region = MemoryFileRegion.create(BLOCKS, block_bytes, name="out-of")
    source_region.bytes[:] = np.random.default_rng(1).integers(
        0, 256, source_region.bytes.size, dtype=np.uint8
    )
    sink_owner, source_owner = Owner(), Owner()
    with transports(name) as (sink_end, source_end):
        sink_end.start(sink_owner, [sink_region])
        address = source_end.start(source_owner, [source_region])
        link = sink_end.dial(address)
        source_owner.wait("linked")
        far = source_owner.heard[0].link
        for end in (link, far):
            end.secure(bytes(32))
        if isinstance(link, MultiLaneLink) and isinstance(far, MultiLaneLink):
            for lane in range(1, link.lanes):
                _widen(link, far, sink_end.dial(address), source_owner, lane)
        yield Pair(
            name,
            link,
            far,
            sink_owner,
            source_owner,
            sink_region,
            source_region,
            sink_end,
            source_end,
        )
    sink_region.close()
    source_region.close()


def _widen(
    link: MultiLaneLink, far: MultiLaneLink, lane: Link, source_owner: Owner, number: int
) -> None:
    source_owner.wait("linked", number + 1)
    there = [heard.link for heard in source_owner.heard if heard.kind == "linked"][number]
    for end in (lane, there):
        end.secure(bytes(32))
    far.add_lane(there)
    link.add_lane(lane)


def window(transfer: int, runs: ByteRuns, group: int = 0, first: int = 0) -> WindowHead:
    return WindowHead(transfer, group, 0, first, runs.count, runs.n_bytes)


def scattered(seed: int, count: int, longest: int) -> ByteRuns:
    rng = np.random.default_rng(seed)
    size = BLOCKS * BLOCK_BYTES
    length = rng.integers(1, longest + 1, count)
    slots = np.sort(rng.choice(size // longest, count, replace=False)) * longest
    return ByteRuns(rng.integers(0, size - longest, count), rng.permutation(slots), length)


def expected(pair: Pair, *moves: ByteRuns) -> NDArray[np.uint8]:
    # Return the sink's memory, initially zero, as it must be after these runs have arrived.
    memory = np.zeros(BLOCKS * BLOCK_BYTES, np.uint8)
    for runs in moves:
        for src, dst, length in zip(runs.src, runs.dst, runs.length, strict=True):
            memory[dst : dst + length] = pair.source_region.bytes[src : src + length]
    return memory
