"""A connection between agents (link) over a stream socket: the base class of the tcp and shm links.

Each link has a thread, which sends and receives. It polls for a moment after the last byte, then
sleeps until the socket or another thread wakes it. A thread that waits for a transfer can do the
sending and receiving itself (`drive`).

tcp.py and shm.py listen and connect. inbound.py and outbound.py have the format of the bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import Blocks
from kvtransfer.protocol.frame import (
    FrameError,
    FrameKind,
    FrameLimits,
    encode_frame,
)
from kvtransfer.transport_interface import (
    MAX_UNPROVEN_BYTES,
    LinkOwner,
    TransportError,
    WindowForecaster,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.transports.pump import (
    PUMP,
    PumpCalls,
    PumpFunctions,
    clear_eventfd,
    ring_eventfd,
)
from kvtransfer.transports.stream.inbound import Inbound
from kvtransfer.transports.stream.kv_encryption import WindowSeal, WindowSealError
from kvtransfer.transports.stream.link_options import LinkOptions
from kvtransfer.transports.stream.outbound import Outbound
from kvtransfer.transports.stream.spin_pause import SpinPause
from kvtransfer.transports.switch_interval import SwitchIntervalHold

_MOST_MESSAGE_BYTES = (4 << 20) + (128 << 10)
_UNPROVEN_LIMITS = FrameLimits(header_bytes=MAX_UNPROVEN_BYTES, payload_bytes=0)
_NEVER = float("inf")
_LONG_SPIN_FACTOR = 4  # factor on the spin time after a sleep that a longer spin would have avoided
_DRIVER_POLL_MS = 5  # milliseconds between two checks of the condition for which a driver waits
_TRICKLE_MS = 50  # after this wait even a few bytes are read: they show that the peer is alive
# How long after its last window a link keeps the interpreter's switch interval short. The next
# window of a transfer, for which the sink gives credit, comes earlier.
_HOLD_INTERVAL_MS = 20
_log = logging.getLogger("penstock")


class StreamLink:
    """One end of a connection between two agents (link) over a stream socket.

    Its own thread sends and receives, or another thread does so in `drive`. Only the one that holds
    `_driver_lock` reads the socket and writes the memory. The link's thread releases this lock
    while it sleeps in the pump (C code). Otherwise a driver would wait until that thread has the
    interpreter lock.
    """

    transport = "stream"
    is_one_sided = False
    # Whether the socket carries the frames as they are, so that the native pump can read it.
    _is_pumped = False
    # Whether threads other than the link's may write to the socket, one at a time.
    _can_send_at_once = True
    _HOLD_MS = 5  # milliseconds for which the thread waits for the next driver before it takes over

    def __init__(
        self,
        sock: socket.socket,
        owner: LinkOwner,
        peer: str,
        options: LinkOptions,
        ended: Callable[[Any], None],
    ) -> None:
        self.peer = peer
        self.window_bytes = options.window_bytes
        self._sock, self._owner, self._options, self._ended_hook = sock, owner, options, ended
        self._forecaster = owner if isinstance(owner, WindowForecaster) else None
        sock.setblocking(False)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pump = PUMP if options.native else None
        fd, reading, writing = sock.fileno(), self._pump_calls(sock), self._pump_calls(sock)
        if reading is not None:
            reading.spin_us, reading.may_wait = int(options.spin_s * 1e6), self._may_wait_for_bytes
        if writing is not None:
            # A message of the peer, or an order for this link, ends the wait for room.
            writing.is_writing = True
        self._out: Outbound = Outbound(fd, self._sent, checked=options.checked, calls=writing)
        self._in = Inbound(fd, self._receive, self, _UNPROVEN_LIMITS, reading)
        self._orders: deque[Callable[[], None]] = deque()
        self._closing = self._ended = self._dialled = False
        self._interval_hold = SwitchIntervalHold(options.switch_interval_s)
        self._last_window_s = 0.0
        self._broken: str | None = None
        self._has_closed_socket = False
        self._init_driving(options)
        self._init_polling(sock)
        self._thread = threading.Thread(
            target=self._run, name=f"kv-{self.transport}-{peer}", daemon=True
        )

    def _init_driving(self, options: LinkOptions) -> None:
        # Initialize the locks, and the state of the threads that drive the link or wait for it.
        self._driver_lock = threading.Lock()
        # A thread holds this lock while it writes. Only the driver waits for the lock; a thread
        # that cannot get it queues its message.
        self._write_lock = threading.Lock()
        self._gate = threading.Lock()
        self._report_lock = threading.Lock()
        self._was_rung = False
        self._sleepers = 0  # threads that wait for an event; changed with the driver lock held
        self._sleeps_long = False  # whether the link's own thread sleeps without a time limit
        self._stepping_thread = 0  # identifier of the thread that is in `_step`
        # Another link has work for this one (kvtransfer/transports/stream/parallel_links.py).
        self._has_lane_work = False
        self._drivers, self._last_driven_s = 0, -_NEVER
        self._spin_s = options.spin_s
        self._spin_pause = SpinPause()

    def _init_polling(self, sock: socket.socket) -> None:
        # Register the socket and the wake-up event, for which the link's own thread sleeps.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._polled_out = self._room_alone = False
        self._polled_in = 1
        self._wake_poll = select.poll()
        self._wake_poll.register(self._wake_fd, select.POLLIN)

    def _pump_calls(self, sock: socket.socket) -> PumpCalls | None:
        if self._pump is None or not self._is_pumped:
            return None
        return PumpCalls(self._pump, sock.fileno(), self._wake_fd)

    # ---- from any thread ----

    @property
    def received_bytes(self) -> int:
        return self._in.received_bytes

    def open(self, *, dialled: bool) -> None:
        """Start the thread of the connection; the owner of an accepted link first gets `on_linked`.

        Raises TransportError, after releasing everything, if no thread can be started.
        """
        self._dialled = dialled
        if not dialled:
            self._orders.append(lambda: self._owner.on_linked(self))
        try:
            self._thread.start()
        except RuntimeError as error:
            self._closing = True
            self._orders.clear()
            self._end()
            raise TransportError(
                f"the thread of the link to {self.peer} cannot be started: {error}"
            ) from error

    def send(self, message: bytes) -> None:
        if len(message) > _MOST_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {len(message)} bytes exceeds the limit of {_MOST_MESSAGE_BYTES}"
            )
        frame = encode_frame(FrameKind.MESSAGE, message)
        if not self._send_at_once(frame):
            self._queue(frame)

    def put(self, head: WindowHead, window: WindowSlice) -> None:
        self._note_window()
        self._queue((head, window))

    def drop(self, transfer: int) -> None:
        self._order(lambda: self._out.drop(transfer))

    def expect_windows(self) -> None:
        self._note_window()

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        return b""

    def accept(self, transfer: int, grant: bytes) -> None:
        pass

    def secure(self, window_key: bytes) -> None:
        if self._options.sealed and self._in.seal is None:
            dialled_key, answered_key = (
                hmac.digest(window_key, label, "sha256") for label in (b"dialled", b"answered")
            )
            self._out.seal, self._in.seal = (
                (WindowSeal(dialled_key), WindowSeal(answered_key))
                if self._dialled
                else (WindowSeal(answered_key), WindowSeal(dialled_key))
            )
        self._in.limits = FrameLimits(header_bytes=_MOST_MESSAGE_BYTES)

    def fence(self, transfer: int) -> None:
        if not self._order(lambda: self._fence(transfer)):
            threading.Thread(target=self._fenced_late, args=(transfer,), daemon=True).start()

    def close(self) -> None:
        self._closing = True
        self._wake(always=True)

    def join(self) -> None:
        """Wait until the thread of the connection has ended, so that it writes no more.

        Does nothing on that thread itself, or before it starts.
        """
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def drive(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Send and receive on the calling thread until `done()` is true, for `timeout_s` seconds at
        most.

        This saves the time to wake the link's own thread. The owner's methods are called on this
        thread meanwhile. Returns whether `done()` became true in time; a batch of KV that is being
        moved may exceed it by a second.

        Raises TransportError if the link is lost.
        """
        deadline_s = time.perf_counter() + timeout_s
        self._count_drivers(1)
        try:
            if not self._driver_lock.acquire(blocking=False):
                self._wake(always=True)
                if not self._driver_lock.acquire(timeout=max(0.0, timeout_s)):
                    return False
            try:
                if self._was_rung and not self._has_closed_socket:
                    # A set wake descriptor would end the first call of the pump.
                    self._clear_wake_fd()
                while not done():
                    if self._broken is not None or self._closing or self._ended:
                        raise TransportError(self._broken or "the link is closed")
                    if time.perf_counter() > deadline_s:
                        return False
                    self._step(done)
            finally:
                self._wake_unless_idle()
                self._driver_lock.release()
        finally:
            self._last_driven_s = time.perf_counter()
            self._count_drivers(-1)
        return True

    def _wake_unless_idle(self) -> None:
        # Wake the link's own thread, which sleeps, if a drive leaves something for it to do.
        is_idle = self._out.is_idle and self._in.is_idle
        must_wake = self._sleeps_long and (self._polled_in > 1 or self._interval_hold.is_held)
        if self._sleepers and (self._has_work() or not is_idle or must_wake):
            self._wake()

    def _has_work(self) -> bool:
        # Return whether there is work to do before the next wait for the socket.
        out = self._out
        has_items = self._has_lane_work or not (out.is_idle or out.is_blocked)
        return has_items or self._closing or self._broken is not None or bool(self._orders)

    def _count_drivers(self, delta: int) -> None:
        with self._gate:
            self._drivers += delta

    def _queue(self, item: bytes | tuple[WindowHead, WindowSlice]) -> None:
        if not self._ended:
            self._out.enqueue(item)
            self._wake()

    def _send_at_once(self, frame: bytes) -> bool:
        # Write a frame on this thread if nothing is queued, which saves waking the link's thread,
        # and lets the peer begin earlier. Return False if nothing was done.
        out = self._out
        if not (self._can_send_at_once and out.is_idle):
            return False
        if not self._write_lock.acquire(blocking=False):
            return False
        try:
            if self._has_closed_socket or not out.send_at_once(frame):
                return False
        finally:
            self._write_lock.release()
        if not self._out.is_idle:
            self._wake()  # wake the link's thread, which writes the remaining bytes
        return True

    def _note_window(self) -> None:
        """Let Python switch threads more often while KV is sent or received over this connection.

        The link's thread ends this at the latest when the next heartbeat wakes it.
        """
        self._last_window_s = time.perf_counter()
        self._interval_hold.take()

    def _order(self, order: Callable[[], None]) -> bool:
        # Queue `order` to run on the link's thread; return False if the thread has ended.
        with self._gate:
            if self._ended:
                return False
            self._orders.append(order)
        # A thread in `_step` runs the orders before it waits.
        if self._stepping_thread != threading.get_ident():
            self._wake(always=True)
        return True

    def _wake(self, *, always: bool = False) -> None:
        reading = self._in.calls
        if always or self._sleepers or (reading is not None and reading.is_waiting):
            with self._gate:
                if not self._ended:
                    self._ring()

    def _fenced_late(self, transfer: int) -> None:
        with self._report_lock:
            self._report_fenced(transfer)

    # ---- on the link's thread ----

    def _prepare(self) -> None:
        """Prepare the socket before the first byte is sent; subclasses override this method."""

    def _run(self) -> None:
        self._prepare()
        while self._broken is None and not self._closing:
            if self._is_driven() and not (self._orders and not self._drivers):
                self._wake_poll.poll(self._HOLD_MS)
                continue
            with self._driver_lock:
                if not self._drivers and self._broken is None:
                    self._step()
        self._end()

    def _is_driven(self) -> bool:
        # Return whether another thread moves this link's bytes by `drive`, or recently did so.
        return self._drivers > 0 or time.perf_counter() - self._last_driven_s < self._HOLD_MS / 1e3

    def _step(self, done: Callable[[], bool] | None = None) -> None:
        self._stepping_thread = threading.get_ident()
        try:
            # A read that found less than it asked for need not be repeated before the wait.
            if not self._move_bytes() or (self._in.is_drained and not (done and done())):
                self._await_event(done)
        except (EOFError, FrameError, WindowSealError, TransportError) as error:
            self._broken = str(error)
        except OSError as error:
            self._broken = error.strerror or str(error)
        except Exception:
            _log.exception("kv: handling an event of the link to %s failed", self.peer)
            self._broken = "this agent failed to handle an event of the link"
        finally:
            self._stepping_thread = 0

    def _move_bytes(self) -> bool:
        if self._orders:
            self._run_orders()
        out = self._out
        moved = self._send_available() if not out.is_idle else False
        if self._room_alone:
            self._room_alone = False
        elif self._receive_available():
            moved = True
            # Replies first: the end of a transfer, among the orders, wakes a thread that would take
            # the interpreter lock.
            if not (out.is_idle or out.is_blocked):
                self._send_available()
            if self._orders:
                self._run_orders()
        return moved

    def _send_available(self) -> bool:
        with self._write_lock:
            return self._out.send_available()

    def _receive_available(self) -> bool:
        # Read what has arrived, and for a payload also wait a moment for the rest.
        moved = self._in.receive_available()
        calls = self._in.calls
        if calls is not None and calls.was_stopped:
            calls.was_stopped = False
            self._clear_wake_fd()
        return moved

    def _may_wait_for_bytes(self) -> bool:
        return not self._has_work() and self._out.is_idle

    def _run_orders(self) -> None:
        if self._was_rung:
            self._clear_wake_fd()
        while self._orders:
            self._orders.popleft()()

    def _ring(self) -> None:
        # Make the event readable; call it with `_gate` held. An event that is readable already
        # stays so until `_clear_wake_fd`, whose caller then looks for work.
        if self._was_rung:
            return
        ring_eventfd(self._wake_fd, self._pump)
        self._was_rung = True

    def _clear_wake_fd(self) -> None:
        # Before its next wait, the caller must check for work from other threads. They have written
        # to the descriptor before this call, or did not because another thread had.
        with self._gate:
            clear_eventfd(self._wake_fd, self._pump)
            self._was_rung = False

    def _await_event(self, done: Callable[[], bool] | None) -> None:
        self._want_in(self._in.wanted_bytes)
        may_spin = not self._out.is_blocked and not self._in.is_in_large_payload
        if may_spin and self._pump is None and self._busy_poll(done):
            return
        self._sleepers += 1
        try:
            if self._has_work() or (done is None and self._drivers):
                return
            timeout_ms = (
                _DRIVER_POLL_MS if done is not None else _TRICKLE_MS if self._polled_in > 1 else -1
            )
            since_s = time.perf_counter()
            self._drop_interval_if_unused(since_s)
            if self._interval_hold.is_held and not 0 <= timeout_ms < _HOLD_INTERVAL_MS:
                timeout_ms = _HOLD_INTERVAL_MS
            self._sleeps_long = timeout_ms < 0 if done is None else self._sleeps_long
            if self._pump is None:
                self._sleep(timeout_ms)
            else:
                spin_s = self._spin_s if may_spin else 0.0
                self._sleep_natively(self._pump, spin_s, timeout_ms, is_driver=done is not None)
            # A sleep and a wake-up cost both ends more than this took, and would keep a short
            # exchange slow.
            was_short = time.perf_counter() - since_s < _LONG_SPIN_FACTOR * self._options.spin_s
            self._spin_s = self._options.spin_s * (_LONG_SPIN_FACTOR if was_short else 1)
        finally:
            self._sleepers -= 1

    def _drop_interval_if_unused(self, now_s: float) -> None:
        # Stop keeping the switch interval short if no window moves, and none has for a while.
        is_late = now_s - self._last_window_s > _HOLD_INTERVAL_MS / 1e3
        if is_late and self._interval_hold.is_held and self._out.is_idle and self._in.is_idle:
            self._interval_hold.drop()

    def _sleep(self, timeout_ms: int) -> None:
        self._want_out(self._out.is_blocked)
        events = self._poll.poll(timeout_ms)
        self._room_alone = events == [(self._sock.fileno(), select.POLLOUT)]
        if any(fd == self._wake_fd for fd, _ in events):
            self._clear_wake_fd()

    def _sleep_natively(
        self, pump: PumpFunctions, spin_s: float, timeout_ms: int, *, is_driver: bool
    ) -> None:
        # Sleep after polling for `spin_s` seconds, with one release of the interpreter lock.
        events = select.POLLIN | select.POLLOUT if self._out.is_blocked else select.POLLIN
        if not is_driver:
            self._driver_lock.release()
        try:
            found, was_stopped = pump.wait(
                self._sock.fileno(), events, self._wake_fd, int(spin_s * 1e6), timeout_ms
            )
        finally:
            if not is_driver:
                self._driver_lock.acquire()
        self._room_alone = found == select.POLLOUT and not was_stopped
        if was_stopped:
            self._clear_wake_fd()

    def _busy_poll(self, done: Callable[[], bool] | None) -> bool:
        # Poll for a while; return True if bytes were moved or are waiting.
        #
        # Polling costs a third of a read that finds nothing.
        clock, look, out = time.perf_counter, self._poll.poll, self._out
        self._want_out(False)
        now_s = clock()
        until_s = now_s + self._spin_s
        if not self._spin_pause.is_over(now_s):
            return False
        while now_s < until_s:
            begin_s = now_s
            # The peer may have been woken on this very core.
            os.sched_yield()
            events = look(0)
            now_s = clock()
            if self._spin_pause.is_contended(begin_s, now_s):
                until_s = 0.0
            if events:
                return self._move_bytes()
            if (
                not out.is_idle
                or self._has_lane_work
                or self._closing
                or (done is None and self._drivers)
            ):
                return True
        if until_s:
            self._spin_pause.reset()
        return False

    def _want_in(self, least: int) -> None:
        if least != self._polled_in:
            self._polled_in = least
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _want_out(self, want: bool) -> None:
        if want != self._polled_out:
            self._polled_out = want
            self._poll.modify(self._sock, select.POLLIN | select.POLLOUT if want else select.POLLIN)

    def _end(self) -> None:
        self._interval_hold.close()
        with self._driver_lock, self._write_lock:
            if self._broken is None:
                with contextlib.suppress(OSError):
                    self._out.send_available()
            self._has_closed_socket = True
            self._sock.close()
            self._in.release()
            self._out.release()
        self._release()
        self._ended_hook(self)
        if not self._closing:
            self._owner.on_lost(self, self._broken or "closed")
        while not self._mark_ended():
            while self._orders:
                self._orders.popleft()()
        os.close(self._wake_fd)

    def _release(self) -> None:
        """Release resources that a subclass added to the connection. The base class has none."""

    def _mark_ended(self) -> bool:
        with self._gate:
            self._ended = not self._orders
            return self._ended

    def _receive(self, buffer: memoryview) -> int:
        return self._sock.recv_into(buffer)

    def _fence(self, transfer: int) -> None:
        self._in.discard_transfer(transfer)
        self._report_fenced(transfer)

    def _report_fenced(self, transfer: int) -> None:
        self._owner.on_fenced(self, transfer)

    # ---- events of Inbound and Outbound ----

    def on_frame(self, kind: FrameKind, header: bytes) -> None:
        if kind is not FrameKind.MESSAGE:
            raise FrameError(
                f"a frame of kind {kind.name} is not allowed over the transport {self.transport}"
            )
        self._owner.on_message(self, header)

    def place_window(self, head: WindowHead) -> WindowSlice | None:
        self._note_window()
        return self._owner.place_window(self, head)

    def following_windows(
        self, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        if self._forecaster is None:
            return ()
        return self._forecaster.following_windows(self, head, most)

    def on_landed(self, head: WindowHead, verdict: WindowVerdict) -> None:
        self._owner.on_landed(self, head, verdict)

    def on_intact_windows(self, heads: Sequence[WindowHead]) -> None:
        assert self._forecaster is not None
        self._forecaster.on_intact_windows(self, heads)

    def _sent(self, head: WindowHead) -> None:
        self._note_window()  # a batch may have taken long, and the peer's reply comes soon
        self._owner.on_sent(self, head)
