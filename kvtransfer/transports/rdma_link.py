"""One RDMA link: a thread that writes windows into the peer's granted memory and says what it did over TCP.

Windows are one-sided writes on a reliable queue pair, the last one with the window's number; when the device has
reported them done, the source looks at its generations again and sends the trailer. A write that the peer's device
refuses (the sink has fenced) ends the queue pair for both: the next epoch's takes over, and windows of other transfers
are written again. Not here: dialling and listening (rdma.py).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from kvtransfer.regions import Blocks, Region
from kvtransfer.transports.base import LinkOwner, Slice, TransportError, WindowHead
from kvtransfer.transports.rdma_grants import MOST_KEYS
from kvtransfer.transports.rdma_in import Arrivals
from kvtransfer.transports.rdma_out import Departure, Departures
from kvtransfer.transports.rdma_pair import Pairs
from kvtransfer.transports.rdma_side import (
    Control,
    Ear,
    Ready,
    Saying,
    Setup,
    Trailer,
    Withdrawn,
    encode,
)
from kvtransfer.transports.verbs import RECEIVED, Completion, Domain, ends_connection, refused

_READ_BYTES = 64 << 10
_MOST_COMPLETIONS = 64
_WINDOW_BYTES = 1 << 20
_PAUSE_S = 0.5
_log = logging.getLogger("penstock")


class RdmaOptions(msgspec.Struct, frozen=True):
    """device, gid_index   None: the first active device, and its address that is routed as IPv4 if there is one
    checksums           whether the sink compares xxh3-64 of what landed with what the source read
    spin_s              how long a thread that has just been busy asks its device again before it sleeps
    setup_s             how long a queue pair may take to come about
    most_keys           keys in one grant; scattered blocks that need more are staged and copied
    """

    device: str | None = None
    gid_index: int | None = None
    checksums: bool = True
    spin_s: float = 50e-6
    setup_s: float = 5.0
    most_keys: int = MOST_KEYS


class RdmaLink:
    """One end. `begin` starts its thread, on which everything happens that `grant` does not do at once.

    refused   writes of ours that the peer's device has turned down, because the peer had fenced
    """

    transport = "rdma"
    one_sided = True

    def __init__(
        self,
        side: socket.socket,
        domain: Domain,
        owner: LinkOwner,
        options: RdmaOptions,
        gone: Callable[[RdmaLink], None],
    ) -> None:
        """Takes over the connected socket `side`. `gone` is called last, when nothing uses the domain any more.

        Raises TransportError, and OSError where the peer has gone already.
        """
        self.peer = "{}:{}".format(*side.getpeername()[:2])
        self.received_bytes = 0
        self.window_bytes = _WINDOW_BYTES
        self.refused = 0
        self._side, self._owner, self._options, self._when_gone = side, owner, options, gone
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._pairs = Pairs(domain)
        except BaseException:
            os.close(self._wake)
            raise
        self._arrivals = Arrivals(domain, options.most_keys)
        gather = domain.device.gather
        self._departures = Departures(
            domain.key_of, self._departed, gather=gather, checksums=options.checksums
        )
        self._outbox: deque[bytes | Departure] = deque()
        self._ear, self._out = Ear(), bytearray()
        self._busy_until = 0.0
        self._deadline: float | None = None
        self._proven = False
        self._commands: deque[Callable[[], None]] = deque()
        self._fences: deque[int] = deque()
        self._gate = threading.Lock()
        self._closing = self._gone = False
        self._news = select.poll()
        for each in (side.fileno(), self._wake, self._pairs.completions.fd):
            self._news.register(each, select.POLLIN)
        self._settled = threading.Event()
        self._dialled = True
        self._ending = threading.Event()
        self._reason: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-rdma-{self.peer}", daemon=True)

    # What the owner may call, from any thread.

    def send(self, message: bytes) -> None:
        self._later(lambda: self._outbox.append(message))

    def put(self, head: WindowHead, window: Slice) -> None:
        self._later(lambda: self._outbox.append(self._departures.put(head, window)))

    def drop(self, transfer: int) -> None:
        self._later(lambda: self._departures.drop(transfer))

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        try:
            return self._arrivals.grant(transfer, regions, blocks)
        finally:
            with self._gate:  # a fence may have waited for this
                if self._fences and not self._gone:
                    os.eventfd_write(self._wake, 1)

    def accept(self, transfer: int, grant: bytes) -> None:
        if grant:
            self._later(lambda: self._departures.accept(transfer, grant))

    def secure(self, window_key: bytes) -> None:
        """The peer may say more than a stranger. Nothing is sealed: a device writes plain bytes, and its network has to
        be trusted."""
        self._proven = True
        self._ear.trust()

    def fence(self, transfer: int) -> None:
        with self._gate:
            gone = self._gone
            if not gone:
                self._fences.append(transfer)
                os.eventfd_write(self._wake, 1)
        if gone:
            threading.Thread(
                target=self._owner.fenced, args=(self, transfer), name="kv-rdma-fence", daemon=True
            ).start()

    def close(self) -> None:
        with self._gate:
            self._closing = True
            if not self._gone:
                os.eventfd_write(self._wake, 1)

    # What the transport calls.

    def begin(self, ending: threading.Event, *, dialled: bool) -> None:
        """Start. The owner of a link that was dialled to us hears `linked` first; for who dials `settled` says how it
        went. `ending`: the transport ends, and the device with it. RuntimeError when there is no thread to be had."""
        self._ending, self._dialled = ending, dialled
        self._thread.start()

    def abandon(self) -> None:
        """Instead of `begin`: nobody has use for this link."""
        self._pairs.close()
        os.close(self._wake)

    def settled(self) -> None:
        """Wait until the link is there, or TransportError."""
        self._settled.wait()
        if self._reason is not None:
            raise TransportError(self._reason)

    def join(self) -> None:
        """Wait for the thread's end, unless this is it."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The thread.

    def _later(self, command: Callable[[], None]) -> None:
        with self._gate:
            if not (self._closing or self._gone):
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        reason = "the transport failed"  # if what stops us is no error of a link
        try:
            self._side.setblocking(False)
            if not self._dialled:
                self._owner.linked(
                    self
                )  # it may close us at once, and then no device does anything for a stranger
            if not self._closing:
                self._renew()
            while not self._closing:
                worked = self._turn()
                self._mind_deadline()
                if not worked:
                    self._wait()
            self._speak()
            reason = "closed"
        except (TransportError, OSError) as wrong:
            reason = str(wrong)
        finally:
            self._finish(reason)

    def _turn(self) -> bool:
        """Do what can be done without waiting; whether that was anything."""
        worked = self._obey()
        worked = self._reap() or worked
        worked = self._listen() or worked
        if self._pairs.writable and self._pairs.pair is not None:
            worked = self._departures.post(self._pairs.pair, self._pairs.epoch) or worked
        return self._speak() or worked

    def _wait(self) -> None:
        """Ask again for a little while, then sleep until somebody wakes us."""
        now = time.perf_counter()
        if now < self._busy_until:
            return
        self._pairs.completions.arm()
        if self._reap():
            return
        self._news.modify(self._side, select.POLLIN | (select.POLLOUT if self._out else 0))
        limit_ms = (
            None if self._deadline is None else max(1, 1 + int(1000 * (self._deadline - now)))
        )
        for fd, _ in self._news.poll(limit_ms):
            if fd == self._wake:
                os.eventfd_read(fd)
            elif fd == self._pairs.completions.fd:
                self._pairs.completions.hush()
        self._busy_until = time.perf_counter() + self._options.spin_s

    def _mind_deadline(self) -> None:
        """However much the peer has to say: either its queue pair is there in time, or this ends."""
        if self._deadline is not None and time.perf_counter() > self._deadline:
            raise TransportError(f"no queue pair to {self.peer} within {self._options.setup_s:g} s")

    def _obey(self) -> bool:
        worked = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        return self._answer_fences() or worked

    def _answer_fences(self) -> bool:
        """One that fails is not forgotten: it ends the link, and is answered when its queue pair is gone."""
        answered = False
        for _ in range(len(self._fences)):
            transfer = self._fences[0]
            if not self._arrivals.fence(transfer):  # it is being granted; who does that wakes us
                self._fences.rotate(-1)
                continue
            self._fences.popleft()
            self._say(Withdrawn(transfer))
            self._owner.fenced(self, transfer)
            answered = True
        return answered

    def _reap(self) -> bool:
        """What the device has done since the last time."""
        found = self._pairs.completions.poll(_MOST_COMPLETIONS)
        broken = False
        for completion in found:
            if completion.number >= RECEIVED:
                broken = self._arrived(completion) or broken
            else:
                broken = self._written(completion) or broken
        if broken:
            self._renew()
        return bool(found)

    def _arrived(self, completion: Completion) -> bool:
        """A peer's last write of a window is there. Whether the pair is broken instead."""
        pairs = self._pairs
        if completion.number - RECEIVED != pairs.epoch or pairs.pair is None:
            return False
        if completion.status:
            return True
        pairs.pair.expect()
        self._land(self._arrivals.written(completion.immediate))
        return False

    def _written(self, completion: Completion) -> bool:
        """Our writes up to this one have been done. Whether the pair is broken instead."""
        epoch, number = divmod(completion.number, 1 << 32)
        if refused(completion.status):
            self.refused += 1
            self._departures.refuse(number)
        if epoch != self._pairs.epoch:
            return False
        if not completion.status:
            self._departures.complete()
            return False
        if not ends_connection(completion.status):
            raise TransportError(
                f"the device gave up writing to {self.peer}: status {completion.status}"
            )
        return True

    def _renew(self) -> None:
        """Another queue pair; what was under way on the last one is written again."""
        self._say(self._pairs.renew())
        self._departures.again()
        if (
            self._deadline is None
        ):  # who asks for another pair before one was of use buys no time by it
            self._deadline = time.perf_counter() + self._options.setup_s

    def _departed(self, departure: Departure) -> None:
        self._owner.sent(self, departure.head)

    def _land(self, trailer: Trailer | None) -> None:
        if trailer is None or not self._arrivals.expected(trailer.head.transfer):
            return
        window = self._owner.incoming(self, trailer.head)
        if window is not None:
            self._owner.landed(self, trailer.head, self._arrivals.verdict(trailer, window))

    def _listen(self) -> bool:
        """What the peer says."""
        try:
            data = self._side.recv(min(_READ_BYTES, self._ear.room))
        except BlockingIOError:
            return False
        if not data:
            raise TransportError("the peer closed the link")
        self.received_bytes += len(data)
        for saying in self._ear.feed(data):
            self._hear(saying)
        return True

    def _hear(self, saying: Saying) -> None:
        if not self._proven and (
            isinstance(saying, Trailer) or (isinstance(saying, Setup) and saying.epoch)
        ):
            raise TransportError("the peer has proven nothing, and wants more than to be known")
        match saying:
            case Control():
                self._owner.message(self, saying.data)
            case Trailer():
                self._land(self._arrivals.told(saying))
            case Withdrawn():
                self._departures.withdraw(saying.transfer)
            case Setup():
                if saying.epoch == self._pairs.epoch + 1:
                    self._renew()
                ready = self._pairs.join(saying)
                if ready is not None:
                    self._say(ready)
            case Ready():
                self._pairs.ready(saying)
                self._connected()

    def _connected(self) -> None:
        """Both ends are ready, perhaps for the first time."""
        if not self._pairs.writable:
            return
        self._deadline = None
        self._settled.set()

    def _say(self, saying: Saying) -> None:
        self._out += encode(saying)

    def _speak(self) -> bool:
        """Messages and trailers, in the order of the owner's calls; a window that is not done holds up what follows."""
        while self._outbox and self._settled.is_set():
            first = self._outbox[0]
            if isinstance(first, bytes):
                self._say(Control(first))
            elif not first.forgotten:
                if not first.done or first.verdict is None:
                    break
                self._say(Trailer(first.number, first.head, first.verdict, first.digest, first.at))
            self._outbox.popleft()
        if not self._out:
            return False
        try:
            del self._out[: self._side.send(self._out)]
        except BlockingIOError:
            return False
        return True

    # The end.

    def _finish(self, reason: str) -> None:
        """No device touches our memory for this link any more; then, and only then, the owner hears of it."""
        self._stop_writers()
        for ending in (self._arrivals.close, self._pairs.close):
            try:
                ending()
            except TransportError as wrong:  # it stays pinned; nobody has a way to write there
                _log.error("kv: after the link to %s: %s", self.peer, wrong)
        with suppress(OSError):
            self._side.shutdown(socket.SHUT_RDWR)
        self._side.close()
        known = self._settled.is_set() or not self._dialled
        self._reason = reason
        self._settled.set()
        if known and not self._closing:
            self._owner.lost(self, reason)
        while not self._last_fences():
            continue
        self._when_gone(self)

    def _stop_writers(self) -> None:
        """Without its queue pair a peer writes nothing, whatever is registered. Until the device has let go of that, no
        block of this link is given back, unless the transport ends, and the device with it."""
        while True:
            try:
                return self._pairs.end()
            except TransportError as wrong:
                _log.error("kv: the link to %s keeps its blocks: %s", self.peer, wrong)
            if self._ending.wait(_PAUSE_S):
                return None

    def _last_fences(self) -> bool:
        """Answer the fences that are still due. True once there are none, and none can come."""
        with self._gate:
            due = list(self._fences)
            self._fences.clear()
            if not due:
                self._gone = True
                os.close(self._wake)
        for transfer in due:
            self._owner.fenced(self, transfer)
        return not due
