"""MemorySlots: the blocks of a store in host memory, which other processes can map and read."""

from __future__ import annotations

import os

from kvtransfer.layout.sealed_files import create_sealed_file
from kvtransfer.store.block_keys import Key
from kvtransfer.store.slot_format import (
    Parts,
    ReadOutcome,
    SlotGeometry,
    SlotHeader,
    SlotReader,
    void_header,
)


class MemorySlots:
    """The places of blocks (slots) of a store in memory. They are in a file that readers can map.

    Only this object can write to the file.

    fd  descriptor of the file, with which other processes read it
    """

    def __init__(self, geometry: SlotGeometry) -> None:
        self.geometry = geometry
        self.fd, self._memory = create_sealed_file("kv-store", geometry.file_bytes)
        self._view = memoryview(self._memory)
        self._view[: len(geometry.pack())] = geometry.pack()
        self._reader = SlotReader(self.fd, geometry)
        self._generation = 0

    def data(self, slot: int, length: int) -> memoryview:
        """Return the memory of a slot, into which a block of `length` bytes can be written."""
        start = self.geometry.data_offset(slot)
        return self._view[start : start + length]

    def void(self, slot: int) -> None:
        start = self.geometry.header_offset(slot)
        self._view[start : start + len(void_header())] = void_header()

    def write(self, slot: int, data: memoryview) -> None:
        self.data(slot, data.nbytes)[:] = data

    def commit(self, slot: int, key: Key, length: int, digest: bytes) -> None:
        self._generation += 1
        packed = SlotHeader(self._generation, length, key, digest).pack()
        start = self.geometry.header_offset(slot)
        self._view[start : start + len(packed)] = packed

    def header(self, slot: int) -> SlotHeader | None:
        return self._reader.header(slot)

    def read(self, slot: int, key: Key, parts: Parts) -> ReadOutcome:
        return self._reader.read(slot, key, parts)

    def close(self) -> None:
        """Close the file. Readers with its descriptor can still read it."""
        self._view.release()
        self._memory.close()
        os.close(self.fd)
