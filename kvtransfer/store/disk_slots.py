"""DiskSlots: the blocks of a store in a file on disk, which a restarted store can read.

A slot is the place of one block, with a header. The header is cleared before the first byte of a
block is written, and written after the last one. So a process that is killed leaves no half-written
block, because the kernel still writes what it has cached of the file.

The file is never synchronised (fsync). A power failure can therefore reorder writes; the digest
then reveals the wrong bytes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvtransfer.store.block_keys import Key
from kvtransfer.store.slot_format import (
    PAGE_BYTES,
    Parts,
    ReadOutcome,
    SlotFileError,
    SlotGeometry,
    SlotHeader,
    SlotReader,
    void_header,
)

FILE_NAME = "slots.kv"


class DiskSlots:
    """The places of blocks (slots) in a store's file on disk.

    Only one process may use the directory of the file. A file with another number or size of slots
    is emptied.

    Raises SlotFileError if another process uses the directory.
    """

    def __init__(self, directory: Path, geometry: SlotGeometry) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.geometry = geometry
        self._fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._own(directory)
            if os.pread(self._fd, PAGE_BYTES, 0) != geometry.pack():
                os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, geometry.file_bytes)
                _write(self._fd, memoryview(geometry.pack()), 0)
        except BaseException:
            os.close(self._fd)
            raise
        self._reader = SlotReader(self._fd, geometry)
        self._generation = 0

    def _own(self, directory: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SlotFileError(f"another store uses the directory {directory}") from None

    def restored(self) -> Iterator[tuple[int, Key]]:
        """Yield the (slot, key) of all blocks that an earlier process left in the file, oldest
        first.

        If a block is there twice, only the newer one is yielded. Only headers are read.
        """
        newest: dict[Key, tuple[int, int]] = {}
        for slot, header in self._reader.headers():
            found = header.generation, slot
            if found > newest.get(header.key, (0, 0)):
                newest[header.key] = found
        for key, (generation, slot) in sorted(newest.items(), key=lambda item: item[1]):
            self._generation = generation
            yield slot, key

    def void(self, slot: int) -> None:
        """Mark a slot on disk as empty, so that its block cannot be read any more.

        Raises OSError if the disk fails.
        """
        _write(self._fd, memoryview(void_header()), self.geometry.header_offset(slot))

    def write(self, slot: int, data: memoryview) -> None:
        _write(self._fd, data, self.geometry.data_offset(slot))

    def commit(self, slot: int, key: Key, length: int, digest: bytes) -> None:
        self._generation += 1
        packed = SlotHeader(self._generation, length, key, digest).pack()
        _write(self._fd, memoryview(packed), self.geometry.header_offset(slot))

    def header(self, slot: int) -> SlotHeader | None:
        return self._reader.header(slot)

    def read(self, slot: int, key: Key, parts: Parts) -> ReadOutcome:
        return self._reader.read(slot, key, parts)

    def close(self) -> None:
        os.close(self._fd)


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
