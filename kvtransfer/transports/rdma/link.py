"""An RDMA connection between two agents: its options and time limits; its thread writes the KV.

Terms: a queue pair is one end of an RDMA connection. A window is a piece of KV. A fence stops all
writes of a transfer.

A window is written directly into the sink's memory; its last write carries the window's number.
When the device reports the writes as complete, the source checks that its blocks were not reused,
and sends the result (trailer) over TCP.

If the sink's device refuses a write because of a fence, the queue pair ends on both sides. A new
one takes over (the next epoch), and windows of other transfers are written again. transport.py
opens and accepts connections.
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

from kvtransfer.layout.memory_regions import Blocks, Region
from kvtransfer.transport_interface import LinkOwner, TransportError, WindowHead, WindowSlice
from kvtransfer.transports.rdma.control import (
    ControlDecoder,
    ControlMessage,
    GrantWithdrawn,
    OwnerMessage,
    QueuePairReady,
    QueuePairSetup,
    RdmaTrailer,
    encode,
)
from kvtransfer.transports.rdma.memory_grants import MOST_KEYS
from kvtransfer.transports.rdma.queue_pair import QueuePairEpochs
from kvtransfer.transports.rdma.receiver import RdmaReceiver
from kvtransfer.transports.rdma.sender import OutgoingWindow, RdmaSender
from kvtransfer.transports.rdma.verbs import (
    RECEIVED,
    Completion,
    ProtectionDomain,
    ends_connection,
    is_refused,
)

_READ_BYTES = 64 << 10
_MOST_COMPLETIONS = 64
_WINDOW_BYTES = 1 << 20
_PAUSE_S = 0.5
_log = logging.getLogger("penstock")


class RdmaOptions(msgspec.Struct, frozen=True):
    """The options of RDMA connections between agents.

    device     name of the RDMA device; None: the first active one
    gid_index  index of the device's address; None: an IPv4-routed one if there is one
    checksums  whether the sink compares the xxh3-64 checksum of received bytes with the source's
    spin_s     seconds that a busy thread polls its device before it sleeps
    setup_s    maximum seconds until an RDMA connection is established
    most_keys  maximum number of memory keys per transfer. Blocks that need more keys are received
               in a staging buffer and copied from there
    """

    device: str | None = None
    gid_index: int | None = None
    checksums: bool = True
    spin_s: float = 50e-6
    setup_s: float = 5.0
    most_keys: int = MOST_KEYS


class RdmaLink:
    """One end of an RDMA connection between agents, with a thread that does almost everything.

    begin() starts the thread. Only `grant` runs on other threads.

    refused_writes  number of writes that the other agent's device refused, because the other agent
                    had stopped the transfer
    """

    transport = "rdma"
    is_one_sided = True

    def __init__(
        self,
        sock: socket.socket,
        domain: ProtectionDomain,
        owner: LinkOwner,
        options: RdmaOptions,
        gone: Callable[[RdmaLink], None],
    ) -> None:
        """Initialize an RDMA connection with the connected socket `sock`, which it then owns.

        `gone` is called at the very end, after the last use of the protection domain.

        Raises TransportError, or OSError if the other agent has already disconnected.
        """
        self.peer = "{}:{}".format(*sock.getpeername()[:2])
        self.received_bytes = 0
        self.window_bytes = _WINDOW_BYTES
        self.refused_writes = 0
        self._sock, self._owner, self._options, self._on_gone = sock, owner, options, gone
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._pairs = QueuePairEpochs(domain)
        except BaseException:
            os.close(self._wake)
            raise
        self._receiver = RdmaReceiver(domain, options.most_keys)
        gather = domain.device.gather
        self._sender = RdmaSender(
            domain.key_of, self._on_sent, gather=gather, checksums=options.checksums
        )
        self._ordered_output: deque[bytes | OutgoingWindow] = deque()
        self._decoder, self._out = ControlDecoder(), bytearray()
        self._busy_until = 0.0
        self._deadline: float | None = None
        self._proven = False
        self._commands: deque[Callable[[], None]] = deque()
        self._fences: deque[int] = deque()
        self._gate = threading.Lock()
        self._closing = self._gone = False
        self._poll = select.poll()
        for fd in (sock.fileno(), self._wake, self._pairs.completions.fd):
            self._poll.register(fd, select.POLLIN)
        self._settled = threading.Event()
        self._dialled = True
        self._ending = threading.Event()
        self._reason: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-rdma-{self.peer}", daemon=True)

    # ---- called by the owner, from any thread

    def send(self, message: bytes) -> None:
        self._schedule(lambda: self._ordered_output.append(message))

    def put(self, head: WindowHead, window: WindowSlice) -> None:
        self._schedule(lambda: self._ordered_output.append(self._sender.put(head, window)))

    def drop(self, transfer: int) -> None:
        self._schedule(lambda: self._sender.drop(transfer))

    def expect_windows(self) -> None:
        pass

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        try:
            return self._receiver.grant(transfer, regions, blocks)
        finally:
            with self._gate:  # a fence may wait for this grant
                if self._fences and not self._gone:
                    os.eventfd_write(self._wake, 1)

    def accept(self, transfer: int, grant: bytes) -> None:
        if grant:
            self._schedule(lambda: self._sender.accept(transfer, grant))

    def secure(self, window_key: bytes) -> None:
        """Allow longer messages, because the other agent has proven its identity.

        KV is not encrypted, because devices write plain bytes. The network must be trusted.
        """
        self._proven = True
        self._decoder.raise_limit()

    def fence(self, transfer: int) -> None:
        with self._gate:
            gone = self._gone
            if not gone:
                self._fences.append(transfer)
                os.eventfd_write(self._wake, 1)
        if gone:
            threading.Thread(
                target=self._owner.on_fenced,
                args=(self, transfer),
                name="kv-rdma-fence",
                daemon=True,
            ).start()

    def close(self) -> None:
        with self._gate:
            self._closing = True
            if not self._gone:
                os.eventfd_write(self._wake, 1)

    # ---- called by the transport

    def begin(self, ending: threading.Event, *, dialled: bool) -> None:
        """Start the thread of the RDMA connection.

        The owner of an accepted link first gets `on_linked`. The end that opened the connection
        waits in `wait_connected`. `ending` is an event that is set when the transport closes.

        Raises RuntimeError if no thread can be started.
        """
        self._ending, self._dialled = ending, dialled
        self._thread.start()

    def abandon(self) -> None:
        """Release the resources of an RDMA connection whose thread was never started."""
        self._pairs.close()
        os.close(self._wake)

    def wait_connected(self) -> None:
        """Wait until the RDMA connection is established. Raises TransportError if it fails."""
        self._settled.wait()
        if self._reason is not None:
            raise TransportError(self._reason)

    def join(self) -> None:
        """Wait for the thread of the RDMA connection to end; return immediately if called on that
        thread.
        """
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- on the link's thread

    def _schedule(self, command: Callable[[], None]) -> None:
        with self._gate:
            if not (self._closing or self._gone):
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        reason = "the transport failed"  # the reason if the end is not an error of the link
        try:
            self._sock.setblocking(False)
            if not self._dialled:
                self._owner.on_linked(
                    self
                    # The owner may close the link immediately, before the device does anything for
                    # an unproven peer.
                )
            if not self._closing:
                self._renew()
            while not self._closing:
                worked = self._run_once()
                self._check_deadline()
                if not worked:
                    self._wait()
            self._send_queued()
            reason = "closed"
        except (TransportError, OSError) as error:
            reason = str(error)
        finally:
            self._finish(reason)

    def _run_once(self) -> bool:
        # Do all work that is possible without waiting; return whether there was any.
        worked = self._run_commands()
        worked = self._handle_completions() or worked
        worked = self._read_control() or worked
        if self._pairs.is_writable and self._pairs.pair is not None:
            worked = self._sender.post(self._pairs.pair, self._pairs.epoch) or worked
        return self._send_queued() or worked

    def _wait(self) -> None:
        # Poll the device for a short time, then sleep until the thread is woken.
        now = time.perf_counter()
        if now < self._busy_until:
            return
        self._pairs.completions.arm()
        if self._handle_completions():
            return
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        limit_ms = (
            None if self._deadline is None else max(1, 1 + int(1000 * (self._deadline - now)))
        )
        for fd, _ in self._poll.poll(limit_ms):
            if fd == self._wake:
                os.eventfd_read(fd)
            elif fd == self._pairs.completions.fd:
                self._pairs.completions.clear_event()
        self._busy_until = time.perf_counter() + self._options.spin_s

    def _check_deadline(self) -> None:
        # Raise TransportError if the queue pair took too long to connect.
        if self._deadline is not None and time.perf_counter() > self._deadline:
            raise TransportError(
                f"the RDMA connection to {self.peer} was not established within "
                f"{self._options.setup_s:g} s"
            )

    def _run_commands(self) -> bool:
        worked = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        return self._answer_fences() or worked

    def _answer_fences(self) -> bool:
        # Stop the writes of transfers whose fence is pending; return whether there were any.
        #
        # A fence that fails ends the link, and is reported after the queue pair's end.
        answered = False
        for _ in range(len(self._fences)):
            transfer = self._fences[0]
            if not self._receiver.fence(transfer):
                # Another thread grants access, and then wakes this one.
                self._fences.rotate(-1)
                continue
            self._fences.popleft()
            self._queue_control(GrantWithdrawn(transfer))
            self._owner.on_fenced(self, transfer)
            answered = True
        return answered

    def _handle_completions(self) -> bool:
        # Handle the device's completions; return whether there were any.
        completions = self._pairs.completions.poll(_MOST_COMPLETIONS)
        broken = False
        for completion in completions:
            if completion.number >= RECEIVED:
                broken = self._arrived(completion) or broken
            else:
                broken = self._written(completion) or broken
        if broken:
            self._renew()
        return bool(completions)

    def _arrived(self, completion: Completion) -> bool:
        # Handle the last write of a peer's window of KV; return whether the queue pair is broken.
        pairs = self._pairs
        if completion.number - RECEIVED != pairs.epoch or pairs.pair is None:
            return False
        if completion.status:
            return True
        pairs.pair.post_receive()
        self._on_trailer(self._receiver.on_written(completion.immediate))
        return False

    def _written(self, completion: Completion) -> bool:
        # Handle the completion of this end's writes up to this one.
        #
        # Return whether the pair is broken.
        epoch, number = divmod(completion.number, 1 << 32)
        if is_refused(completion.status):
            self.refused_writes += 1
            self._sender.on_refused(number)
        if epoch != self._pairs.epoch:
            return False
        if not completion.status:
            self._sender.on_completion()
            return False
        if not ends_connection(completion.status):
            raise TransportError(
                f"the RDMA device could not write to {self.peer}: its work completion has the "
                f"error status {completion.status}"
            )
        return True

    def _renew(self) -> None:
        self._queue_control(self._pairs.renew())
        self._sender.restart()
        if self._deadline is None:
            # The deadline stays: asking for another pair before one was usable gains no time.
            self._deadline = time.perf_counter() + self._options.setup_s

    def _on_sent(self, departure: OutgoingWindow) -> None:
        self._owner.on_sent(self, departure.head)

    def _on_trailer(self, trailer: RdmaTrailer | None) -> None:
        if trailer is None or not self._receiver.is_granted(trailer.head.transfer):
            return
        window = self._owner.place_window(self, trailer.head)
        if window is not None:
            self._owner.on_landed(self, trailer.head, self._receiver.verify(trailer, window))

    def _read_control(self) -> bool:
        # Read and handle the peer's control messages; return whether there were any.
        try:
            data = self._sock.recv(min(_READ_BYTES, self._decoder.room_bytes))
        except BlockingIOError:
            return False
        if not data:
            raise TransportError("the other agent closed the connection")
        self.received_bytes += len(data)
        for message in self._decoder.feed(data):
            self._handle(message)
        return True

    def _handle(self, message: ControlMessage) -> None:
        if not self._proven and (
            isinstance(message, RdmaTrailer)
            or (isinstance(message, QueuePairSetup) and message.epoch)
        ):
            raise TransportError("the other agent sent data before its proof of identity")
        match message:
            case OwnerMessage():
                self._owner.on_message(self, message.data)
            case RdmaTrailer():
                self._on_trailer(self._receiver.on_trailer(message))
            case GrantWithdrawn():
                self._sender.withdraw(message.transfer)
            case QueuePairSetup():
                if message.epoch == self._pairs.epoch + 1:
                    self._renew()
                ready = self._pairs.join(message)
                if ready is not None:
                    self._queue_control(ready)
            case QueuePairReady():
                self._pairs.on_ready(message)
                self._connected()

    def _connected(self) -> None:
        if not self._pairs.is_writable:
            return
        self._deadline = None
        self._settled.set()

    def _queue_control(self, message: ControlMessage) -> None:
        self._out += encode(message)

    def _send_queued(self) -> bool:
        # Send messages and trailers in the order of the owner's calls.
        #
        # Return whether any was sent. A window that is not done holds up everything after it.
        while self._ordered_output and self._settled.is_set():
            first = self._ordered_output[0]
            if isinstance(first, bytes):
                self._queue_control(OwnerMessage(first))
            elif not first.is_dropped:
                if not first.is_done or first.verdict is None:
                    break
                self._queue_control(
                    RdmaTrailer(first.number, first.head, first.verdict, first.digest, first.at)
                )
            self._ordered_output.popleft()
        if not self._out:
            return False
        try:
            del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            return False
        return True

    # ---- the end

    def _finish(self, reason: str) -> None:
        self._stop_writers()
        for ending in (self._receiver.close, self._pairs.close):
            try:
                ending()
            except TransportError as error:
                # The memory stays pinned, but no peer can write to it any more.
                _log.error("kv: an error followed the end of the link to %s: %s", self.peer, error)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        known = self._settled.is_set() or not self._dialled
        self._reason = reason
        self._settled.set()
        if known and not self._closing:
            self._owner.on_lost(self, reason)
        while not self._last_fences():
            continue
        self._on_gone(self)

    def _stop_writers(self) -> None:
        # End the queue pair, so that the peer cannot write, whatever is registered.
        #
        # While the device fails to do so, no block of this link is returned, unless the transport
        # closes its device.
        while True:
            try:
                return self._pairs.end()
            except TransportError as error:
                _log.error(
                    "kv: the blocks of the link to %s stay reserved, because the device "
                    "may still write to them: %s",
                    self.peer,
                    error,
                )
            if self._ending.wait(_PAUSE_S):
                return None

    def _last_fences(self) -> bool:
        # Report the transfers whose writes have been stopped (pending fences).
        #
        # Return True once there are none and none can follow.
        with self._gate:
            due = list(self._fences)
            self._fences.clear()
            if not due:
                self._gone = True
                os.close(self._wake)
        for transfer in due:
            self._owner.on_fenced(self, transfer)
        return not due
