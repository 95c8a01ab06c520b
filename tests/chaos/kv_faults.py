"""A KV transport for tests that injects faults: altered, repeated, lost or delayed messages and KV.

It wraps any real transport. KV is sent in windows, units of some byte ranges. This module also has
a TCP proxy that breaks connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from random import Random

import msgspec

from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import Blocks
from kvtransfer.transport_interface import (
    Link,
    LinkOwner,
    MultiLaneLink,
    Transport,
    WindowForecaster,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.util.clock import Clock


class FaultProbabilities(msgspec.Struct, frozen=True):
    """How often faults are injected into a KV transport: probabilities from 0 to 1.

    Fields ending in `message` apply to each message. Fields ending in `window` apply to each
    window, a unit in which KV is sent.

    late_s  maximum seconds of a delay
    """

    spoil_message: float = 0.0
    repeat_message: float = 0.0
    lose_message: float = 0.0
    delay_message: float = 0.0
    repeat_window: float = 0.0
    lose_window: float = 0.0
    delay_window: float = 0.0
    replay_window: float = 0.0  # replayed after the end of the transfer
    late_s: float = 0.0


class FaultyTransport:
    def __init__(
        self, inner: Transport, dice: FaultProbabilities, rng: Random, clock: Clock
    ) -> None:
        self.name, self.is_sealed = inner.name, inner.is_sealed
        self.inner, self.dice, self.rng, self.clock = inner, dice, rng, clock
        self._links: dict[Link, FaultyLink] = {}
        self._owner: LinkOwner | None = None
        self._lock = threading.Lock()

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        self._owner = owner
        return self.inner.start(self, regions)

    def dial(self, address: str) -> Link:
        return self._wrapped(self.inner.dial(address))

    def close(self) -> None:
        self.inner.close()

    def _wrapped(self, link: Link) -> FaultyLink:
        with self._lock:
            if link not in self._links:
                self._links[link] = FaultyLink(link, self)
            return self._links[link]

            # ---- events of the inner transport, passed to the owner as the wrapper's

    def on_linked(self, link: Link) -> None:
        assert self._owner is not None
        self._owner.on_linked(self._wrapped(link))

    def on_message(self, link: Link, data: bytes) -> None:
        assert self._owner is not None
        self._owner.on_message(self._wrapped(link), data)

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        assert self._owner is not None
        return self._owner.place_window(self._wrapped(link), head)

    def following_windows(
        self, link: Link, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        assert isinstance(self._owner, WindowForecaster)
        return self._owner.following_windows(self._wrapped(link), head, most)

    def on_intact_windows(self, link: Link, heads: Sequence[WindowHead]) -> None:
        assert isinstance(self._owner, WindowForecaster)
        self._owner.on_intact_windows(self._wrapped(link), heads)

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        assert self._owner is not None
        self._owner.on_landed(self._wrapped(link), head, verdict)

    def on_sent(self, link: Link, head: WindowHead) -> None:
        assert self._owner is not None
        self._owner.on_sent(self._wrapped(link), head)

    def on_fenced(self, link: Link, transfer: int) -> None:
        assert self._owner is not None
        self._owner.on_fenced(self._wrapped(link), transfer)

    def on_lost(self, link: Link, reason: str) -> None:
        assert self._owner is not None
        self._owner.on_lost(self._wrapped(link), reason)


class FaultyLink:
    def __init__(self, inner: Link, end: FaultyTransport) -> None:
        self._inner, self._end = inner, end
        self.transport, self.peer = inner.transport, inner.peer
        self.window_bytes, self.is_one_sided = inner.window_bytes, inner.is_one_sided
        self.lanes = inner.lanes if isinstance(inner, MultiLaneLink) else 1

    @property
    def received_bytes(self) -> int:
        return self._inner.received_bytes

    @property
    def has_carried_windows(self) -> bool:
        return isinstance(self._inner, MultiLaneLink) and self._inner.has_carried_windows

    def send(self, message: bytes) -> None:
        dice, rng = self._end.dice, self._end.rng
        if rng.random() < dice.lose_message:
            return
        if rng.random() < dice.spoil_message:
            offset = rng.randrange(len(message))
            message = (
                message[:offset]
                + bytes([message[offset] ^ (1 << rng.randrange(8))])
                + message[offset + 1 :]
            )
        if rng.random() < dice.delay_message:
            self._later(lambda: self._inner.send(message))
        else:
            self._inner.send(message)
        if rng.random() < dice.repeat_message:
            self._inner.send(message)

    def put(self, head: WindowHead, window: WindowSlice) -> None:
        dice, rng = self._end.dice, self._end.rng
        if rng.random() < dice.lose_window:
            return
        if rng.random() < dice.delay_window:
            self._later(lambda: self._inner.put(head, window))
        else:
            self._inner.put(head, window)
        if rng.random() < dice.repeat_window:
            self._inner.put(head, window)
        if rng.random() < dice.replay_window:
            # Bytes of an ended transfer, from a source that does not check.
            self._later(
                lambda: self._inner.put(
                    head, msgspec.structs.replace(window, is_current=lambda: True)
                )
            )

    def _later(self, call: object) -> None:
        clock = self._end.clock
        clock.call_at(clock.now() + self._end.rng.random() * self._end.dice.late_s, call)  # type: ignore[arg-type]

    def drop(self, transfer: int) -> None:
        self._inner.drop(transfer)

    def expect_windows(self) -> None:
        self._inner.expect_windows()

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        return self._inner.grant(transfer, regions, blocks)

    def accept(self, transfer: int, grant: bytes) -> None:
        self._inner.accept(transfer, grant)

    def fence(self, transfer: int) -> None:
        self._inner.fence(transfer)

    def secure(self, window_key: bytes) -> None:
        self._inner.secure(window_key)

    def add_lane(self, lane: Link) -> None:
        assert isinstance(self._inner, MultiLaneLink)
        assert isinstance(lane, FaultyLink)
        self._inner.add_lane(lane._inner)

    def close(self) -> None:
        self._inner.close()


class Proxy:
    """A TCP proxy in front of `target`, which a test can command to delay, drop or close
    connections.

    Its threads end with the connections.
    """

    def __init__(self, target: str, rng: Random) -> None:
        self._target, self._rng = target, rng
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._spoil = 0
        self._flows = threading.Event()
        self._flows.set()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True, name="proxy").start()

    def spoil(self, bits: int) -> None:
        self._spoil += bits

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def sever(self) -> None:
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flows.set()
        self.sever()
        for thread in self._threads:
            thread.join(2)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                host, _, port = self._target.rpartition(":")
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                for one, other in ((near, far), (far, near)):
                    carrier = threading.Thread(
                        target=self._carry, args=(one, other), name="proxy", daemon=True
                    )
                    carrier.start()  # before `close` can find it, which joins it
                    self._threads.append(carrier)

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(64 << 10):
                self._flows.wait()
                other.sendall(self._spoiled(data))
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _spoiled(self, data: bytes) -> bytes:
        if self._spoil <= 0:
            return data
        self._spoil -= 1
        offset = self._rng.randrange(len(data))
        return (
            data[:offset]
            + bytes([data[offset] ^ (1 << self._rng.randrange(8))])
            + data[offset + 1 :]
        )
