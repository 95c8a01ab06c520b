"""Lets the pump (C code) send or receive several windows (units of KV) in one call.

The pump works without Python's interpreter lock, so it need not wait for the lock between windows.
inbound.py and outbound.py decide which windows form a batch, and continue where the pump stopped.
"""

from __future__ import annotations

import numpy as np

from kvtransfer.layout.memory_regions import GenerationCheck
from kvtransfer.protocol.frame import PREAMBLE_BYTES, TRAILER_BYTES, WINDOW_HEADER_BYTES
from kvtransfer.transports.iovec import Iovecs, MemoryPieces, Stretch, address_of
from kvtransfer.transports.pump import Digest, PumpCalls

MOST_WINDOWS = 32
# A batch ends after this number of bytes, so that other work gets a turn.
MOST_BYTES = 256 << 20
# Minimum size of a window in a batch. Preparing a batch of smaller ones costs more than it saves.
LEAST_BYTES = 256 << 10
# Factor by which the pump waits longer for a batch than for one window. Its progress is visible
# during the wait, and each batch that ends early costs both ends a wait for the interpreter lock.
_PATIENCE_FACTOR = 20
FRAME_BYTES = PREAMBLE_BYTES + WINDOW_HEADER_BYTES

_ROW_WORDS = 10  # number of words in `struct window` of _pump.c


class WindowBatch:
    """The windows (units of KV) that the pump sends or receives in one call, as a table for C code.

    Between the bytes of two windows A and B, the trailer of A (with its checksum) and the header of
    B are sent together. Both are called the frame of B. When receiving, the pump compares the frame
    with the expected one. When sending, it adds the checksum.
    """

    def __init__(self, calls: PumpCalls) -> None:
        self._calls = calls
        table = np.zeros((MOST_WINDOWS, _ROW_WORDS), np.uint64)
        self._words, self._table = table.data.cast("B").cast("Q"), address_of(table)
        # Row i has the trailer of window i - 1, if any, and the frame of window i, which are sent
        # together. The last row has only the trailer of the batch's last window.
        frames = np.zeros((MOST_WINDOWS + 1, TRAILER_BYTES + FRAME_BYTES), np.uint8)
        self._frames, self._frames_address = frames, address_of(frames)
        self._iovecs = [Iovecs() for _ in range(MOST_WINDOWS)]
        self._free = self._iovecs
        self._count = 0
        self._is_awaited = False  # whether the first window has not come yet
        self._progress = np.zeros(1, np.uint64)
        self._progress_address = address_of(self._progress)

    @property
    def received_bytes(self) -> int:
        """Return the number of bytes of all batches, which grows while the pump receives one."""
        return int(self._progress.item())

    def begin(self, pieces: MemoryPieces | None, ahead: Stretch = (0, 0)) -> None:
        """Start a batch with the window (unit of KV) that is being moved now.

        pieces  the memory of its bytes; None: the first window is yet to come
        ahead   address and length of bytes to send before it
        """
        self._count = 0
        self._is_awaited = pieces is None
        if pieces is None:
            self._free = self._iovecs
            return
        # The current window may have been the last one of the batch before.
        self._free = [table for table in self._iovecs if table is not pieces.table]
        self._fill(pieces, ahead)

    def next_iovecs(self) -> Iovecs:
        """Return an unused table for the memory of the next unit of KV that is added."""
        return self._free[self._count - 1]

    def add(self, pieces: MemoryPieces, header: bytes, check: GenerationCheck | None) -> None:
        """Add the next window (unit of KV) to the batch.

        pieces  memory of its bytes
        header  its header, which is sent before it
        check   how the pump notices that its blocks were released for reuse; None at a receiver
        """
        index = self._count
        self._frames[index, TRAILER_BYTES:] = np.frombuffer(header, np.uint8)
        self._fill(pieces, self._frame(index))
        self.set_check(index, check)

    def set_check(self, index: int, check: GenerationCheck | None) -> None:
        """Let the pump check that the blocks of window `index` were not released for reuse.

        check  the blocks and their expected reuse counters; None: no check. The pump gets addresses
               in it, so the caller must keep it until move() has returned
        """
        words = (0, 0, 0, 0, 0)
        if check is not None:
            words = (
                check.region.generations.__array_interface__["data"][0],
                check.blocks.__array_interface__["data"][0],
                check.promised.__array_interface__["data"][0],
                check.blocks.size,
                0 if check.lease_flag is None else check.lease_flag.__array_interface__["data"][0],
            )
        begin = index * _ROW_WORDS + 5
        for offset, word in enumerate(words):
            self._words[begin + offset] = word

    @property
    def count(self) -> int:
        return self._count

    def frame_bytes(self, index: int, begin: int) -> bytes:
        """Return the frame of window `index`: the previous window's trailer, and its own header.

        The pump has filled in the checksum. `begin` is the first byte to return.
        """
        return bytes(self._frames[index, begin:])

    def last_trailer_bytes(self, begin: int) -> bytes:
        """Return the trailer (checksum) after the batch's last window, from byte `begin` on.

        It is complete if the pump has sent a part of it.
        """
        return bytes(self._frames[MOST_WINDOWS, begin:TRAILER_BYTES])

    def move(self, digest: Digest | None, stage: int = 0) -> tuple[int, int | None, int]:
        """Send or receive the batch by one call of the pump, as far as possible.

        digest  the checksum; None: there is none
        stage   0: send. Otherwise: receive, and write what follows the last window to this address

        Returns three numbers:

        - the index of the last window that was begun; all before it are complete
        - how many bytes of it were moved, with its frame and trailer; None: the call would block
        - how many bytes of all windows were moved

        If no window was begun, the index is -1, and the second number counts bytes that were
        received where a header was expected. Raises OSError.
        """
        calls = self._calls
        function = calls.pump.receive_windows if stage else calls.pump.send_windows
        calls.is_waiting = True
        try:
            index, moved, all_bytes, calls.was_stopped = function(
                calls.fd,
                calls.stop_fd,
                self._table,
                self._count,
                stage or self._frame(MOST_WINDOWS)[0],
                self._progress_address if stage else 0,
                *((0, 0, 0, 0) if digest is None else digest.addresses),
                self._patience_ms() if calls.may_wait() else 0,
                calls.spin_us,
            )
        finally:
            calls.is_waiting = False
        return index, None if moved < 0 else moved, all_bytes

    def _patience_ms(self) -> int:
        is_long = self._count > 1 or self._is_awaited
        return self._calls.patience_ms * (_PATIENCE_FACTOR if is_long else 1)

    def _frame(self, index: int) -> Stretch:
        size = TRAILER_BYTES + FRAME_BYTES
        return self._frames_address + index * size, size

    def _fill(self, pieces: MemoryPieces, frame: Stretch) -> None:
        rows, count = pieces.rows()
        words, begin = self._words, self._count * _ROW_WORDS
        words[begin], words[begin + 1], words[begin + 2] = rows, count, pieces.remaining
        words[begin + 3], words[begin + 4] = frame
        self._count += 1
