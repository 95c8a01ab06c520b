"""Writes the access log: buffers its lines, and lets a thread append them to the file.

access_line.py has the fields of a line. access_log_file.py has the file.
"""

from __future__ import annotations

import asyncio
import logging
from _thread import start_new_thread
from contextlib import suppress

import msgspec

from gateway.config import Observability
from gateway.metrics.metric_types import Counter
from gateway.telemetry.access_line import AccessLine
from gateway.telemetry.access_log_file import LogFile, Rotation

log = logging.getLogger("penstock")

REOPEN_RETRY_S = 0.05
BUFFER_CAP_BYTES = 8 * 1024 * 1024  # buffer size above which lines are dropped and counted


LINES_PER_BLOCK = 32
"""Number of log lines that are encoded together, which takes a third less time than encoding them
one by one.
"""


class AccessLog:
    """A buffered log file; a thread writes it, so that a slow disk never delays a request."""

    __slots__ = (
        *("_blocks", "_dropped", "_encoder", "_file", "_flush_s", "_lines", "_loop", "_size"),
        *("_timer", "_writing", "has_blocks", "is_enabled"),
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
        self._writing: asyncio.Future[None] | None = None

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
        if self._file is None:
            return
        if self._writing is None:
            self._begin()
        else:
            self._loop.call_later(REOPEN_RETRY_S, self.reopen)

    def _flush(self) -> None:
        self._timer = None
        if self._writing is not None:
            self._timer = self._loop.call_later(self._flush_s, self._flush)
        elif self._lines or self._blocks:
            self._begin()

    def _begin(self) -> None:
        # Pass the buffered lines to a new thread, which cannot keep the process alive.
        #
        # threading.Thread is not used: its start() blocks the event loop until the thread runs.
        assert self._file is not None
        block = self._take()
        self._writing = self._loop.create_future()
        try:
            start_new_thread(self._write, (self._file, block))
        except RuntimeError:  # no thread could be started; drop these lines and try again later
            self._written(block.count(b"\n"))

    def _write(self, file: LogFile, block: bytes) -> None:
        lost = file.write(block)
        with suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._written, lost)

    def _written(self, lost: int) -> None:
        self._dropped.inc(lost)
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.set_result(None)

    def _take(self) -> bytes:
        if self._lines:
            self._encode()
        blocks, self._blocks, self._size = self._blocks, [], 0
        return b"".join(blocks)

    async def close(self) -> None:
        """Write the remaining lines, waiting at most two seconds for a slow disk. Call it once."""
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(2):  # wait for the write in progress, then write the remaining lines
            if self._writing is not None:
                await asyncio.wait([self._writing], timeout=1)
            if self._file is not None and self._writing is None and (self._lines or self._blocks):
                self._begin()
        if self._file is not None and self._writing is None:
            self._file.close()
        self._file, self.is_enabled = None, False
