"""A batch on a local disk that this process owns (has leased), and the journal of its results."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path

import msgspec

from gateway.batch.disk_files import replace_file, sync_folder
from gateway.batch.disk_ownership import BatchOwner
from gateway.batch.file_and_batch_objects import BatchRecord
from gateway.batch.result_journal import JournalReader
from gateway.batch.storage_interface import LeaseLostError


class DiskBatch:
    """A batch in a folder on a local disk, which this process has the right to run (its lease).

    It implements ClaimedBatch (storage_interface.py): access to the batch's record, input file and
    journal of results.
    """

    def __init__(
        self,
        folder: Path,
        record: BatchRecord,
        owner: BatchOwner,
        clock: Callable[[], float],
        close_batch: Callable[[BatchRecord], None],
    ) -> None:
        # Initialize; `close_batch` deletes what only unfinished batches need.
        self.folder, self.record = folder, record
        self._owner, self._clock, self._close_batch = owner, clock, close_batch

    def renew(self) -> None:
        if not self._owner.claim(self.folder, self._clock()):
            raise LeaseLostError(
                "this process has lost the lease of the batch: another process has taken over "
                "the batch"
            )

    def save(self, record: BatchRecord) -> None:
        path = self.folder / "record.json"
        self._owner.change(self.folder, partial(replace_file, path, msgspec.json.encode(record)))
        self.record = record

    def finish(self, record: BatchRecord) -> None:
        self.save(record)
        self._close_batch(record)

    def release(self) -> None:
        self._owner.release(self.folder)

    def open_input(self) -> BufferedReader:
        return (self.folder / "input").open("rb")

    def read_input(self, offset: int, size: int) -> bytes:
        with self.open_input() as file:
            file.seek(offset)
            return file.read(size)

    def open_journal(self, reader: JournalReader) -> JournalFile:
        path = self.folder / "journal"
        path.touch(mode=0o600)
        for line in self.journal_lines():
            reader.feed(line)
        return JournalFile(path, reader.size, partial(self._owner.change, self.folder))

    def journal_lines(self) -> Iterator[bytes]:
        with (self.folder / "journal").open("rb") as file:
            yield from file


class JournalFile:
    """The journal file of a batch, to which results of requests are appended.

    It implements BatchJournal (storage_interface.py).
    """

    pause_s = 0.0

    def __init__(self, path: Path, size: int, change: Callable[[Callable[[], None]], None]) -> None:
        # Open the journal, and cut off everything after its first `size` bytes.
        #
        # `change` makes a call while this process holds the lease; it raises LeaseLostError if not.
        self._lock = threading.Lock()
        self._change = change
        self._is_open = True
        self._is_damaged = False  # a write has failed, perhaps in the middle of an entry
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        sync_folder(path.parent)

    def append(self, data: bytes) -> None:
        with self._lock:
            if not self._is_open:
                raise OSError("cannot append to the batch's journal: it is closed")
            self._change(partial(self._write, data))

    def _write(self, data: bytes) -> None:
        # The next entry must not continue the line of an entry that was written in part.
        view = memoryview(b"\n" + data if self._is_damaged else data)
        self._is_damaged = True
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)
        self._is_damaged = False

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            os.close(self._fd)
