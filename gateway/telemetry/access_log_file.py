"""The file of the access log: appends lines, reopens a moved file, and rotates by size.

Several processes may append to the same file: workers, or two processes during a restart. Each
block of lines is one write with O_APPEND, so blocks are never mixed. Only one thread at a time uses
a LogFile; after its construction, this is never the event loop's thread.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE_MODE = 0o640
OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class Rotation(msgspec.Struct, frozen=True):
    """Settings for log rotation: start a new file at `size` bytes and keep `keep` older ones.

    The older files are named FILE.1 (newest) to FILE.N.
    """

    size: int
    keep: int


class LogFile:
    """An open log: stdout, or the file at a path.

    Before each block, the path is checked. If it leads to another file or to none, it is opened
    again. Therefore logrotate may move the file without sending a signal. A truncated file
    (copytruncate) is appended to.
    """

    __slots__ = ("_fd", "_is_regular", "_needs_newline", "_path", "_rotation")

    def __init__(self, where: str, rotation: Rotation | None = None) -> None:
        """Open the log; `where` is a path or the word `stdout`.

        Raises OSError if the file cannot be opened.
        """
        self._path = None if where == "stdout" else Path(where)
        self._rotation = rotation
        self._needs_newline = False
        self._fd = (
            sys.stdout.fileno()
            if self._path is None
            else os.open(self._path, OPEN_FLAGS, FILE_MODE)
        )
        self._is_regular = self._path is not None and stat.S_ISREG(os.fstat(self._fd).st_mode)

    def write(self, block: bytes) -> int:
        """Append a block of whole lines to the log; return how many lines were lost.

        Lines are lost when the disk is full or a pipe is closed.
        """
        if self._is_regular:
            with suppress(OSError):  # the old file is still open and takes the lines
                self._prepare(len(block))
        prefix = b"\n" if self._needs_newline and block else b""
        data, written = prefix + block, 0
        try:
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError:
            if written:
                self._needs_newline = not data[:written].endswith(b"\n")
            return data.count(b"\n", max(written, len(prefix)))
        self._needs_newline = self._needs_newline and not data
        return 0

    def reopen(self) -> None:
        """Open the log's path again if it leads to another file now.

        Raises OSError when that fails.
        """
        if self._path is None or not self._is_regular or self._is_current():
            return
        fresh = os.open(self._path, OPEN_FLAGS, FILE_MODE)
        os.close(self._fd)
        self._fd, self._needs_newline = fresh, False

    def close(self) -> None:
        if self._path is not None:
            os.close(self._fd)

    def _prepare(self, length: int) -> None:
        self.reopen()
        rotation = self._rotation
        if rotation is None or not self._is_full(rotation, length):
            return
        # If the file is not current, another process has rotated it.
        with self._locked():
            if self._is_current() and self._is_full(rotation, length):
                self._shift(rotation.keep)
        self.reopen()

    def _is_full(self, rotation: Rotation, length: int) -> bool:
        # Return whether `length` more bytes would exceed the file's maximum size.
        #
        # An empty file accepts a block of any length.
        size = os.fstat(self._fd).st_size
        return size > 0 and size + length > rotation.size

    def _is_current(self) -> bool:
        # Return whether the path still leads to the open file.
        assert self._path is not None
        ours = os.fstat(self._fd)
        try:
            current = os.stat(self._path)
        except OSError:
            return False
        return (current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Lock the file, so that no other process rotates it meanwhile.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _shift(self, keep: int) -> None:
        # Rename FILE to FILE.1, FILE.1 to FILE.2 and so on; the oldest file is overwritten.
        assert self._path is not None
        for number in range(keep - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.rename(self._numbered(number + 1))
        self._path.rename(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.{number}")
