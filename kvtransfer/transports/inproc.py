"""A KV transport between agents of one process, with simulated bandwidth, latency and faults.

On a VirtualClock, it is a simulation with a random seed. On a ThreadClock without latency, it is
the fastest transport. Real bytes are copied, in two steps with time between them. So the same races
can occur as with other transports. The main classes are Inproc and InprocWire.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import Blocks
from kvtransfer.transport_interface import (
    Link,
    LinkOwner,
    TransportError,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.util.clock import Callback, Clock, Timer

_TRICKLE_S = 0.02


class WireConditions(msgspec.Struct, frozen=True):
    """How a simulated network behaves: its speed and its faults.

    latency_s    seconds that every message takes
    bytes_per_s  bandwidth; None: as fast as memory
    corrupt      probability that one byte of a window is changed
    truncate     probability that the end of the window is lost
    duplicate    probability that the window arrives twice
    delay        probability that later windows arrive before it
    delay_s      maximum seconds of such a delay
    sever        probability that the connection breaks instead of delivering the window
    fence_s      maximum seconds that a fence (stop of all writes) takes; until then, windows that
                 are on the way are still written

    Probabilities are from 0 to 1, and apply to each window, a unit in which KV is sent.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    corrupt: float = 0.0
    truncate: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    sever: float = 0.0
    fence_s: float = 0.0


class InprocWire:
    """The simulated network between the Inproc transports of one process.

    freeze, thaw    suspend an agent like SIGSTOP, and resume it
    kill            end an agent forever
    stall, unstall  hold back all messages from and to an agent that keeps running, and deliver them

    All calls run on `clock`, which its owner closes.
    """

    def __init__(
        self, clock: Clock, conditions: WireConditions | None = None, rng: Random | None = None
    ) -> None:
        self.clock = clock
        self.conditions = conditions or WireConditions()
        self.rng = rng or Random(0)
        self._ends: dict[str, Inproc] = {}
        self._numbers = itertools.count(1)
        self._frozen_calls: dict[str, list[Callback]] = {}
        self._stalled_calls: dict[str, list[Callback]] = {}
        self._dead: set[str] = set()

    def listen(self, end: Inproc) -> str:
        address = f"inproc-{next(self._numbers)}"
        self._ends[address] = end
        return address

    def unlisten(self, address: str) -> None:
        self._ends.pop(address, None)

    def find(self, address: str) -> Inproc:
        """Return the in-process transport at `address`. Raises TransportError if there is none."""
        end = self._ends.get(address)
        if end is None or address in self._dead:
            raise TransportError(f"no in-process transport listens at {address}")
        return end

    def freeze(self, address: str) -> None:
        self._frozen_calls.setdefault(address, [])

    def thaw(self, address: str) -> None:
        for call in self._frozen_calls.pop(address, []):
            self.run_at(address, call)

    def stall(self, address: str) -> None:
        self._stalled_calls.setdefault(address, [])

    def unstall(self, address: str) -> None:
        for call in self._stalled_calls.pop(address, []):
            self.clock.call_at(self.clock.now(), call)

    def kill(self, address: str) -> None:
        self._dead.add(address)
        self._frozen_calls.pop(address, None)
        for link in self._ends.pop(address).links:
            link.reset()

    def run_at(self, address: str, call: Callback, delay_s: float = 0.0) -> Timer:
        """Schedule a call for the agent at `address` after `delay_s` seconds.

        The call is delayed further while the agent is frozen, and dropped if the agent was killed.
        """
        return self.clock.call_at(self.clock.now() + delay_s, lambda: self._make(address, call))

    def deliver(self, source: str, sink: str, call: Callback, delay_s: float = 0.0) -> None:
        """Deliver a message from one agent to another, by a call that is scheduled at the receiver.

        The call is made after the simulated latency of the network plus `delay_s` seconds. While
        one of the two agents is stalled, the call waits until it continues.

        source, sink  names of the sending and the receiving agent
        call          the function to call
        """
        stalled = self._stalled_calls.get(source, self._stalled_calls.get(sink))
        if stalled is not None:
            stalled.append(lambda: self.deliver(source, sink, call))
        else:
            self.run_at(sink, call, self.conditions.latency_s + delay_s)

    def _make(self, address: str, call: Callback) -> None:
        if address in self._dead:
            return
        if address in self._frozen_calls:
            self._frozen_calls[address].append(call)
        else:
            call()


class WireClock:
    """The clock of one agent on the simulated network.

    It stops while the agent is frozen, and forever when the agent is killed.
    """

    def __init__(self, wire: InprocWire, address: Callable[[], str]) -> None:
        self._wire = wire
        self._address = address

    def now(self) -> float:
        return self._wire.clock.now()

    def call_at(self, when: float, call: Callback) -> Timer:
        return self._wire.run_at(self._address(), call, when - self.now())

    def run_in_thread(self, call: Callback) -> None:
        self._wire.run_at(self._address(), call)


class Inproc:
    """The KV transport of one agent on the simulated network.

    The agent must use the clock `agent_clock`, so that it can be frozen and killed.
    """

    name = "inproc"
    is_sealed: bool | None = None

    def __init__(self, wire: InprocWire) -> None:
        self.wire = wire
        self.address = ""
        self.links: list[InprocLink] = []
        self.owner: LinkOwner | None = None
        self.agent_clock = WireClock(wire, lambda: self.address)

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        self.owner = owner
        self.address = self.wire.listen(self)
        return self.address

    def dial(self, address: str) -> Link:
        far_end = self.wire.find(address)
        near, far = InprocLink(self, address), InprocLink(far_end, self.address)
        near.far, far.far = far, near
        self.links.append(near)
        far_end.links.append(far)
        self.wire.deliver(
            self.address, address, lambda: far.notify_owner(lambda owner: owner.on_linked(far))
        )
        return near

    def close(self) -> None:
        self.wire.unlisten(self.address)
        for link in list(self.links):
            link.close()


class _Arrival:
    __slots__ = ("data", "digest", "head", "verdict", "void", "window")

    def __init__(self, head: WindowHead) -> None:
        self.head = head
        self.window: WindowSlice | None = None
        self.data: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.digest = 0
        self.verdict = WindowVerdict.OK
        self.void = False


class InprocLink:
    """One end of a simulated connection (link) between two agents of this process.

    Except for the queue, it is only used by calls of the network's clock, one at a time.
    """

    transport = "inproc"
    is_one_sided = False

    def __init__(self, end: Inproc, peer: str) -> None:
        self.peer = peer
        self.received_bytes = 0
        self.window_bytes = 1 << 20
        self.far: InprocLink
        self._end, self._wire = end, end.wire
        self._queue: deque[bytes | tuple[WindowHead, WindowSlice]] = deque()
        self._sending: _Arrival | None = None
        self._closed = False
        self._arrivals: list[_Arrival] = []

    def send(self, message: bytes) -> None:
        self._queue.append(message)
        self._schedule(self._pump)

    def put(self, head: WindowHead, window: WindowSlice) -> None:
        self._queue.append((head, window))
        self._schedule(self._pump)

    def drop(self, transfer: int) -> None:
        self._schedule(lambda: self._drop(transfer))

    def expect_windows(self) -> None:
        pass

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        return b""

    def accept(self, transfer: int, grant: bytes) -> None:
        pass

    def secure(self, window_key: bytes) -> None:
        pass

    def fence(self, transfer: int) -> None:
        seconds = (
            self._wire.conditions.fence_s
            and self._wire.rng.random() * self._wire.conditions.fence_s
        )
        self._wire.run_at(self._end.address, lambda: self._fence(transfer), seconds)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._leave()
            self._wire.deliver(
                self._end.address,
                self.peer,
                lambda: self.far.on_far_closed("the other agent closed the connection"),
            )

    def reset(self) -> None:
        """End this side of the simulated connection, as if its process had died."""
        self._closed = True
        self._wire.deliver(
            self._end.address, self.peer, lambda: self.far.on_far_closed("connection reset")
        )

    def on_far_closed(self, reason: str) -> None:
        """Record that the other end of the simulated connection has closed.

        The agent at this end gets one call of `on_lost`, with the reason.
        """
        self.notify_owner(lambda owner: owner.on_lost(self, reason))
        self._closed = True
        self._leave()

    def notify_owner(self, tell: Callable[[LinkOwner], None]) -> None:
        """Call `tell` with the agent at this end of the connection, to report an event.

        Does nothing after a close.
        """
        if not self._closed and self._end.owner is not None:
            self.received_bytes += 1
            tell(self._end.owner)

    def _leave(self) -> None:
        if self in self._end.links:
            self._end.links.remove(self)

    def _schedule(self, call: Callback) -> None:
        self._wire.run_at(self._end.address, call)

    def _pump(self) -> None:
        while self._queue and self._sending is None and not self._closed:
            item = self._queue.popleft()
            if isinstance(item, bytes):
                self._call_peer(partial(_deliver, item))
            else:
                self._begin(*item)

    def _drop(self, transfer: int) -> None:
        self._queue = deque(
            item for item in self._queue if isinstance(item, bytes) or item[0].transfer != transfer
        )
        if self._sending is not None and self._sending.head.transfer == transfer:
            self._sending.verdict = WindowVerdict.STALE

    def _call_peer(self, call: Callable[[InprocLink], None], delay_s: float = 0.0) -> None:
        far = self.far
        self._wire.deliver(self._end.address, self.peer, lambda: call(far), delay_s)

    def _begin(self, head: WindowHead, window: WindowSlice) -> None:
        # Read the first half of a window of KV; the second half follows when the bandwidth allows.
        rng, conditions = self._wire.rng, self._wire.conditions
        if conditions.sever and rng.random() < conditions.sever:
            return self._break()
        self._sending = arrival = _Arrival(head)
        _check(window, arrival)
        arrival.data = np.empty(head.n_bytes, np.uint8)
        half = len(window.runs.length) // 2
        offset = _gather(window, arrival.data, 0, 0, half)
        late_s = (
            rng.random() * conditions.delay_s
            if conditions.delay and rng.random() < conditions.delay
            else 0.0
        )
        self._call_peer(lambda far: far._arrive(arrival), late_s)
        seconds = head.n_bytes / conditions.bytes_per_s if conditions.bytes_per_s else 0.0
        self._flow(seconds, lambda: self._finish(arrival, window, (half, offset), late_s))
        return None

    def _flow(self, seconds: float, finish: Callback) -> None:
        # Wait `seconds` for a window of KV to be sent, and then call `finish`.
        #
        # Meanwhile, signs of life go to the far end.
        if seconds > _TRICKLE_S:
            self._call_peer(lambda far: far.notify_owner(lambda owner: None))
            self._wire.run_at(
                self._end.address, lambda: self._flow(seconds - _TRICKLE_S, finish), _TRICKLE_S
            )
        else:
            self._wire.run_at(self._end.address, finish, seconds)

    def _finish(
        self, arrival: _Arrival, window: WindowSlice, progress: tuple[int, int], late_s: float
    ) -> None:
        half, offset = progress
        _gather(window, arrival.data, offset, half, len(window.runs.length))
        _check(window, arrival)
        arrival.digest = _digest(arrival.data)
        self._sending = None
        self.notify_owner(lambda owner: owner.on_sent(self, arrival.head))
        self._inject_faults(arrival)
        self._call_peer(lambda far: far._complete(arrival), late_s)
        rng, conditions = self._wire.rng, self._wire.conditions
        if conditions.duplicate and rng.random() < conditions.duplicate:
            duplicate = _Arrival(arrival.head)
            duplicate.data = arrival.data
            duplicate.digest = arrival.digest
            duplicate.verdict = arrival.verdict
            self._call_peer(lambda far: far._arrive(duplicate), rng.random() * conditions.delay_s)
            self._call_peer(lambda far: far._complete(duplicate), conditions.delay_s)
        self._pump()

    def _inject_faults(self, arrival: _Arrival) -> None:
        rng, conditions = self._wire.rng, self._wire.conditions
        if conditions.corrupt and rng.random() < conditions.corrupt and len(arrival.data):
            arrival.data[rng.randrange(len(arrival.data))] ^= 1 << rng.randrange(8)
        if conditions.truncate and rng.random() < conditions.truncate:
            arrival.data = arrival.data[: rng.randrange(len(arrival.data) or 1)]

    def _break(self) -> None:
        self.on_far_closed("the link broke")
        self._call_peer(lambda far: far.on_far_closed("the link broke"))

    def _arrive(self, arrival: _Arrival) -> None:
        # Ask the owner for the destination of a window of KV, and start to write it.
        #
        # The blocks of the window may be written as long as it is in `_arrivals`.
        owner = self._end.owner
        if self._closed or owner is None:
            return
        arrival.window = owner.place_window(self, arrival.head)
        if arrival.window is not None:
            self._arrivals.append(arrival)
            _scatter(
                arrival.window.runs,
                arrival.data,
                arrival.window.region,
                0,
                len(arrival.window.runs.length) // 2,
            )

    def _complete(self, arrival: _Arrival) -> None:
        if arrival.window is None or arrival.void or self._closed:
            return
        runs = arrival.window.runs
        is_whole = len(arrival.data) == arrival.head.n_bytes
        _scatter(runs, arrival.data, arrival.window.region, 0, len(runs.length))
        self._arrivals.remove(arrival)
        if not is_whole or _digest(arrival.data) != arrival.digest:
            arrival.verdict = WindowVerdict.CORRUPT
        self.notify_owner(lambda owner: owner.on_landed(self, arrival.head, arrival.verdict))

    def _fence(self, transfer: int) -> None:
        # Stop all writes of a transfer and report that to the owner, also on a closed link.
        for arrival in [arrival for arrival in self._arrivals if arrival.head.transfer == transfer]:
            arrival.void = True
            self._arrivals.remove(arrival)
        if self._end.owner is not None:
            self._end.owner.on_fenced(self, transfer)


def _digest(data: NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def _deliver(message: bytes, link: InprocLink) -> None:
    link.notify_owner(lambda owner: owner.on_message(link, message))


def _check(window: WindowSlice, arrival: _Arrival) -> None:
    if window.is_current is not None and not window.is_current():
        arrival.verdict = WindowVerdict.STALE


def _gather(window: WindowSlice, out: NDArray[np.uint8], offset: int, first: int, last: int) -> int:
    # Copy byte ranges (runs) [first, last) of a window to `out` at `offset`; return the end offset.
    memory, runs = window.region.bytes, window.runs
    for start, length in zip(
        runs.src[first:last].tolist(), runs.length[first:last].tolist(), strict=True
    ):
        out[offset : offset + length] = memory[start : start + length]
        offset += length
    return offset


def _scatter(
    runs: ByteRuns, data: NDArray[np.uint8], region: Region, first: int, last: int
) -> None:
    # Copy the data of byte ranges [first, last) to their places at the sink, as far as it goes.
    memory, offset = region.bytes, int(runs.length[:first].sum())
    for start, length in zip(
        runs.dst[first:last].tolist(), runs.length[first:last].tolist(), strict=True
    ):
        piece = data[offset : offset + length]
        memory[start : start + piece.size] = piece
        offset += length
