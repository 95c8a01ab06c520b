"""Loads the pump: C code that moves the bytes of KV transfers without Python's interpreter lock.

`PUMP` is None in these cases: the pump was not compiled (setup.py), or it was compiled from older
source, python-xxhash does not export its C functions, or PENSTOCK_KV_PUMP=off is set. Python code
then moves the bytes (iovec.py). Each agent may use the pump or not, because the bytes on the
connection are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

# Milliseconds that the pump waits for the rest of a window before other work gets a turn: its bytes
# count as a sign of life of the peer only when it returns.
PUMP_MS = 50

INTERFACE = 2
"""Version of the pump's interface. A pump compiled from an older _pump.c is not used."""


class PumpFunctions(NamedTuple):
    """The functions of the pump (_pump.c), whose parameters are described there.

    move             reads or writes the bytes of one window (piece of KV)
    receive_windows  reads the bytes of several windows
    send_windows     writes the bytes of several windows
    wait             waits for a socket or an eventfd
    receive          reads a few bytes, with the interpreter lock held
    send             writes a few bytes, with the interpreter lock held
    ring             makes an eventfd readable, with the interpreter lock held
    clear            makes an eventfd unreadable again, with the interpreter lock held
    """

    move: Callable[..., tuple[int, bool]]
    receive_windows: Callable[..., tuple[int, int, int, bool]]
    send_windows: Callable[..., tuple[int, int, int, bool]]
    wait: Callable[[int, int, int, int, int], tuple[int, bool]]
    receive: Callable[[int, int, int], int]
    send: Callable[[int, int, int], int]
    ring: Callable[[int], int]
    clear: Callable[[int], int]


def ring_eventfd(fd: int, pump: PumpFunctions | None) -> None:
    """Make an eventfd readable.

    pump  functions of the pump, with which this thread keeps the interpreter lock; None: it gives
          the lock up, and waits for it again if another thread computes
    """
    if pump is not None:
        pump.ring(fd)
    else:
        os.eventfd_write(fd, 1)


def clear_eventfd(fd: int, pump: PumpFunctions | None) -> None:
    """Make a non-blocking eventfd unreadable, if it is readable; see `ring_eventfd`."""
    if pump is not None:
        pump.clear(fd)
        return
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)


class PumpCalls:
    """The arguments and the state of calls of the pump (C code that moves bytes), for one
    connection.

    There is one object for each direction.

    pump         functions of the pump
    fd           the socket
    stop_fd      an eventfd; when it becomes readable, the pump stops waiting
    is_writing   True if bytes are written to the socket, False if they are read
    patience_ms  maximum milliseconds to wait for bytes or for room in the socket
    may_wait     function that returns whether the pump may wait. It is called after `is_waiting` is
                 set, so that new work for this thread makes stop_fd readable
    is_waiting   whether a call may be waiting now
    spin_us      microseconds to poll at the beginning of a wait, before sleeping
    was_stopped  whether stop_fd was readable at the end of the last call
    """

    __slots__ = (
        "fd",
        "is_waiting",
        "is_writing",
        "may_wait",
        "patience_ms",
        "pump",
        "spin_us",
        "stop_fd",
        "was_stopped",
    )  # fmt: skip

    def __init__(
        self,
        pump: PumpFunctions,
        fd: int,
        stop_fd: int,
        may_wait: Callable[[], bool] = lambda: True,
        *,
        is_writing: bool = False,
    ) -> None:
        self.pump, self.fd, self.stop_fd, self.is_writing = pump, fd, stop_fd, is_writing
        self.may_wait = may_wait
        self.patience_ms, self.spin_us = PUMP_MS, 0
        self.is_waiting = self.was_stopped = False


class Digest:
    """An XXH3-64 checksum that C code can update while it moves bytes; like xxhash.xxh3_64.

    C code gets addresses, which are valid as long as this object exists.

    update_address  address of the C function that adds bytes
    state_address   address of the checksum's state
    addresses       addresses of the functions that add bytes, start again and return the checksum,
                    and of the state
    """

    __slots__ = ("state_address", "update_address")

    def __init__(self) -> None:
        self.state_address = 0
        self.update_address: int = _XXH3.update_address
        state = _XXH3.create()
        if not state:
            raise MemoryError("there is not enough memory for an XXH3 digest")
        self.state_address = state
        self.reset()

    def reset(self) -> None:
        """Discard the data hashed so far, so that the digest starts like a new one."""
        _XXH3.reset(self.state_address)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        return (
            self.update_address,
            _XXH3.reset_address,
            _XXH3.digest_address,
            self.state_address,
        )

    def update(self, data: memoryview) -> None:
        """Hash another contiguous piece of memory into the digest."""
        # from_buffer would refuse read-only memory.
        _XXH3.update(self.state_address, bytes(data), len(data))

    def intdigest(self) -> int:
        return int(_XXH3.digest(self.state_address))

    def __del__(self) -> None:
        if self.state_address:
            _XXH3.free(self.state_address)


class _Xxh3:
    # XXH3's functions in the C library inside python-xxhash. Raises AttributeError if they are not
    # exported.

    def __init__(self) -> None:
        library = ctypes.PyDLL(  # short calls: they keep the lock
            importlib.import_module("xxhash._xxhash").__file__
        )
        self.create = _function(library, "XXH3_createState", ctypes.c_void_p)
        self.free = _function(library, "XXH3_freeState", ctypes.c_int, ctypes.c_void_p)
        self.reset = _function(library, "XXH3_64bits_reset", ctypes.c_int, ctypes.c_void_p)
        self.digest = _function(library, "XXH3_64bits_digest", ctypes.c_uint64, ctypes.c_void_p)
        # The first uses the widest vector instructions of this processor; x86-64 only.
        name = next(
            name
            for name in ("XXH3_64bits_update_dispatch", "XXH3_64bits_update")
            if hasattr(library, name)
        )
        self.update = _function(
            library, name, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
        )
        self.update_address, self.reset_address, self.digest_address = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (self.update, self.reset, self.digest)
        )


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


def _load() -> tuple[PumpFunctions, _Xxh3] | None:
    if os.environ.get("PENSTOCK_KV_PUMP") == "off":
        return None
    try:
        native = importlib.import_module("kvtransfer.transports._pump")
        if native.INTERFACE != INTERFACE:
            return None
        functions = (getattr(native, name) for name in PumpFunctions._fields)
        return PumpFunctions(*functions), _Xxh3()
    except (ImportError, AttributeError, StopIteration, OSError):
        return None


_loaded = _load()
PUMP: PumpFunctions | None = _loaded[0] if _loaded else None
_XXH3: Any = _loaded[1] if _loaded else None
EVENTFD_CALLS: tuple[Callable[[int], None], Callable[[int], None]] = (
    partial(ring_eventfd, pump=PUMP),
    partial(clear_eventfd, pump=PUMP),
)
"""Functions that make an eventfd readable and unreadable, by the pump if it is there."""
