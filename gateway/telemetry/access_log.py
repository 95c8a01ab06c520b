"""Writes the access log: buffers its lines, and lets a thread append them to the file.

access_line.py has the fields of a line. access_log_file.py has the file.
"""

from __future__ import annotations

import asyncio
import logging
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import msgspec

from gateway.config import Observability
from gateway.metrics.metric_types import Counter
from gateway.telemetry.access_line import AccessLine
from gateway.telemetry.access_log_file import LogFile, Rotation

log = logging.getLogger("penstock")

REOPEN_RETRY_S = 0.05
CLOSE_S, CLOSE_CHECK_S = 1.0, 0.005  # how long close() waits for a write, and how often it looks
BUFFER_CAP_BYTES = 8 * 1024 * 1024  # buffer size above which lines are dropped and counted


LINES_PER_BLOCK = 32
"""Number of log lines that are encoded together, which takes a third less time than encoding them
one by one.
"""
WRITE_BYTES = 512 * 1024
"""Size of the buffer at which it is written without a wait for the timer.

It is still in the processor's cache then. At full load, `access_flush` alone would collect several
MB, and copying those from memory took 4 % of the CPU time of a request.
"""


class _Writer:
    # A thread that appends blocks of lines to a file, one at a time, and waits between them.
    #
    # Starting a thread for each block would take more CPU time than a few requests do.
    #
    # is_busy  whether the newest block is not written yet

    __slots__ = ("_block", "_file", "_is_started", "_on_lost", "_wake", "is_busy")

    def __init__(self, file: LogFile, on_lost: Callable[[int], None]) -> None:
        # `on_lost` is called in the thread with the number of lines that could not be written.
        self._file = file
        self._on_lost = on_lost
        self._block: bytes | None = b""
        self._wake = allocate_lock()
        self._wake.acquire()
        self._is_started = self.is_busy = False

    def write(self, block: bytes) -> None:
        # Let the thread append a block. Call this only while it is not busy.
        #
        # Raises RuntimeError if the thread cannot be started. threading.Thread is not used: its
        # start() blocks the event loop until the thread runs, and the thread keeps the process
        # alive.
        if not self._is_started:
            start_new_thread(self._run, ())
            self._is_started = True
        self._block = block
        self.is_busy = True
        self._wake.release()

    def end(self) -> None:
        # Let the thread end. Call this only while it is not busy.
        self._block = None
        if self._is_started:
            self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            block, self._block = self._block, b""
            if block is None:
                return
            try:
                lost = self._file.write(block)
            except Exception:  # later blocks still need the thread
                log.exception("a part of the access log could not be written")
                lost = block.count(b"\n")
            if lost:
                self._on_lost(lost)
            self.is_busy = False


class AccessLog:
    """A buffered log file; a thread writes it, so that a slow disk never delays a request."""

    __slots__ = (
        *("_blocks", "_dropped", "_encoder", "_file", "_flush_s", "_lines", "_loop", "_size"),
        *("_timer", "_writer", "has_blocks", "is_enabled"),
    )

    def __init__(
        self, config: Observability, loop: asyncio.AbstractEventLoop, dropped: Counter
    ) -> None:
        """Create the access log and open its file; the metric `dropped` counts lost lines.

        Raises OSError if the file cannot be opened.
        """
        rotate = config.access_rotate
        rotation = None if rotate is None else Rotation(rotate.size, rotate.keep)
        self._file = None if config.access_log == "off" else LogFile(config.access_log, rotation)
        self._writer = None if self._file is None else _Writer(self._file, self._count_lost)
        self.is_enabled = self._file is not None
        self._dropped = dropped
        self.has_blocks = config.access_blocks is not False
        self._flush_s = config.access_flush
        self._loop = loop
        self._encoder = msgspec.json.Encoder()
        self._lines: list[AccessLine] = []  # lines that are not encoded yet
        self._blocks: list[bytes] = []  # encoded lines, `_size` bytes in all
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: AccessLine) -> None:
        """Append a line to the access log.

        The caller must not change `line` afterwards, because it is encoded later in a thread.
        """
        if self._size > BUFFER_CAP_BYTES:
            self._dropped.inc()
            return
        self._lines.append(line)
        if len(self._lines) >= LINES_PER_BLOCK:
            self._encode()
            writer = self._writer
            if self._size >= WRITE_BYTES and writer is not None and not writer.is_busy:
                self._begin(writer)
        if self._timer is None:
            self._timer = self._loop.call_later(self._flush_s, self._flush)

    def _encode(self) -> None:
        # Encode the new lines; a line that cannot be encoded does not lose the others.
        lines, self._lines = self._lines, []
        try:
            block = self._encoder.encode_lines(lines)
        except Exception:
            block = b"".join(map(self._encode_one, lines))
        self._blocks.append(block)
        self._size += len(block)

    def _encode_one(self, line: AccessLine) -> bytes:
        try:
            return self._encoder.encode(line) + b"\n"
        except Exception:
            log.exception("the access log line of request %s could not be written", line.id)
            self._dropped.inc()
            return b""

    def reopen(self) -> None:
        """Open the access log again if its path leads to another file now, as after a log rotation.

        This happens in the thread that writes the log.
        """
        if self._writer is None:
            return
        if self._writer.is_busy:
            self._loop.call_later(REOPEN_RETRY_S, self.reopen)
        else:
            self._begin(self._writer)

    def _flush(self) -> None:
        self._timer = None
        if self._writer is None:
            return
        if self._writer.is_busy:
            self._timer = self._loop.call_later(self._flush_s, self._flush)
        elif self._lines or self._blocks:
            self._begin(self._writer)

    def _begin(self, writer: _Writer) -> None:
        # Pass the buffered lines to the thread.
        block = self._take()
        try:
            writer.write(block)
        except RuntimeError:  # no thread could be started; drop these lines and try again later
            self._dropped.inc(block.count(b"\n"))

    def _count_lost(self, lines: int) -> None:
        # Count lines that the thread could not write; the metric belongs to the event loop.
        with suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._dropped.inc, lines)

    def _take(self) -> bytes:
        if self._lines:
            self._encode()
        blocks, self._blocks, self._size = self._blocks, [], 0
        return b"".join(blocks)

    async def close(self) -> None:
        """Write the remaining lines, waiting at most two seconds for a slow disk. Call it once."""
        if self._timer is not None:
            self._timer.cancel()
        writer, self._writer, self.is_enabled = self._writer, None, False
        if writer is None or self._file is None:
            return
        await _until_idle(writer)
        if not writer.is_busy and (self._lines or self._blocks):
            self._begin(writer)
            await _until_idle(writer)
        if not writer.is_busy:
            writer.end()
            self._file.close()
        self._file = None


async def _until_idle(writer: _Writer) -> None:
    ends = monotonic() + CLOSE_S
    while writer.is_busy and monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(CLOSE_CHECK_S)
