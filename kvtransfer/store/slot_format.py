"""The format of the files in which a KV store keeps its blocks, in memory and on disk.

A file has one page that describes it, then a table of headers, then slots of equal size. A slot is
the place of one block, and its header names the block. While a slot is written, its header names no
block. So a writer that is killed leaves nothing readable. This module also reads blocks, and
verifies them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Protocol

import msgspec
from xxhash import xxh3_64_digest, xxh3_128

from kvtransfer.store.block_keys import KEY_BYTES, Key

Parts = Sequence[memoryview]
"""The memory of one block in pieces, for example one per rank. Every piece is contiguous bytes."""

PAGE_BYTES = 4096
HEADER_BYTES = 128
MAX_SLOTS = 1 << 24
MAX_SLOT_BYTES = 1 << 30
DIGEST_BYTES = 16
_CHECK_BYTES = 8
_VOID = bytes(HEADER_BYTES)
_HEADER = Struct(f"<QQ{KEY_BYTES}s{DIGEST_BYTES}s")
_FILE = Struct("<16sQQ")
_MAGIC = b"kv-store-slots-1"
_SCAN_BYTES = 1 << 20


class SlotFileError(Exception):
    """Raised for a file that cannot be used: a wrong size or format, or another process uses it."""


class ReadOutcome(msgspec.Struct, frozen=True):
    """Whether a block was read correctly from its slot (place in a file).

    is_current  whether the slot held the wanted block both before and after the read
    is_intact   whether, in addition, the bytes match the block's digest; use them only then
    """

    is_current: bool
    is_intact: bool


class SlotHeader(msgspec.Struct, frozen=True):
    """The header of one slot in a store's memory or disk file. It describes the slot's block.

    generation  number that is different for every block ever written to the file
    """

    generation: int
    length: int
    key: Key
    digest: bytes

    def pack(self) -> bytes:
        body = _HEADER.pack(self.generation, self.length, self.key, self.digest)
        return body + xxh3_64_digest(body)

    @staticmethod
    def unpack(data: bytes | memoryview) -> SlotHeader | None:
        """Decode the header of a slot (place of a block); None if it is empty or damaged."""
        body = bytes(data[: _HEADER.size])
        if len(data) < HEADER_BYTES or not any(body[:8]):
            return None
        if bytes(data[_HEADER.size : _HEADER.size + _CHECK_BYTES]) != xxh3_64_digest(body):
            return None
        return SlotHeader(*_HEADER.unpack(body))


class SlotGeometry(msgspec.Struct, frozen=True):
    """How many blocks a file of the KV store can contain, and their maximum size.

    The place of a block is called a slot. Raises ValueError if a number is out of range.
    """

    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS or not 1 <= self.slot_bytes <= MAX_SLOT_BYTES:
            raise ValueError(
                f"{self.slots} slots of {self.slot_bytes} bytes are impossible: the number must "
                f"be 1 to {MAX_SLOTS}, the size 1 to {MAX_SLOT_BYTES} bytes"
            )

    @property
    def file_bytes(self) -> int:
        return self.data_offset(self.slots)

    @property
    def stride(self) -> int:
        """The distance in bytes from one slot to the next, in whole memory pages."""
        return -(-self.slot_bytes // PAGE_BYTES) * PAGE_BYTES

    def header_offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * HEADER_BYTES

    def data_offset(self, slot: int) -> int:
        table = -(-self.slots * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES
        return PAGE_BYTES + table + slot * self.stride

    def pack(self) -> bytes:
        """Return the first page of the file, which describes its format."""
        return _FILE.pack(_MAGIC, self.slots, self.slot_bytes).ljust(PAGE_BYTES, b"\0")


class SlotFile(Protocol):
    """The interface of a file with a KV store's blocks, in memory or on disk.

    A slot is the place of one block. Only BlockStore writes to the file.
    """

    geometry: SlotGeometry

    def void(self, slot: int) -> None:
        """Make the block in a slot unreadable, because another block will be written there."""
        ...

    def write(self, slot: int, data: memoryview) -> None:
        """Write the bytes of a block into a slot, whose previous block must have been made
        unreadable.

        Raises OSError if the disk fails.
        """
        ...

    def commit(self, slot: int, key: Key, length: int, digest: bytes) -> None:
        """Make a block readable that was written completely into a slot (its place in the file).

        Raises OSError if the disk fails.
        """
        ...

    def read(self, slot: int, key: Key, parts: Parts) -> ReadOutcome:
        """Copy a block into `parts`, whose sizes add up to its length, and verify the copy."""
        ...

    def header(self, slot: int) -> SlotHeader | None: ...

    def close(self) -> None: ...


class SlotReader:
    """Reads blocks of a KV store from its file, in any process that has the file's descriptor.

    The store may reuse a slot (place of a block) during a read. Therefore the slot's header is read
    before and after the bytes, and the bytes are compared with the digest.
    """

    def __init__(self, fd: int, geometry: SlotGeometry) -> None:
        self.fd = fd
        self.geometry = geometry

    def header(self, slot: int) -> SlotHeader | None:
        """Return the header of a slot; None if it names no block. Raises OSError if the disk
        fails.
        """
        return SlotHeader.unpack(os.pread(self.fd, HEADER_BYTES, self.geometry.header_offset(slot)))

    def read(self, slot: int, key: Key, parts: Parts) -> ReadOutcome:
        """Copy a block into `parts` and verify the copy. Raises OSError if the disk fails."""
        before = self.header(slot)
        length = sum(part.nbytes for part in parts)
        if before is None or before.key != key or before.length != length:
            return ReadOutcome(is_current=False, is_intact=False)
        _read_into(self.fd, parts, self.geometry.data_offset(slot))
        if self.header(slot) != before:
            return ReadOutcome(is_current=False, is_intact=False)
        return ReadOutcome(is_current=True, is_intact=digest_of(parts) == before.digest)

    def headers(self) -> Iterator[tuple[int, SlotHeader]]:
        """Yield (slot, header) of all readable blocks, in order of the slots."""
        step = _SCAN_BYTES // HEADER_BYTES
        for first in range(0, self.geometry.slots, step):
            count = min(step, self.geometry.slots - first)
            offset = self.geometry.header_offset(first)
            table = memoryview(os.pread(self.fd, count * HEADER_BYTES, offset))
            for index in range(len(table) // HEADER_BYTES):
                start = index * HEADER_BYTES
                header = SlotHeader.unpack(table[start : start + HEADER_BYTES])
                if header is not None and header.length <= self.geometry.slot_bytes:
                    yield first + index, header


def digest_of(parts: Parts) -> bytes:
    """Return the 128-bit xxh3 digest of a KV block, by which readers verify it.

    `parts` are the pieces of its bytes, in order.
    """
    state = xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def void_header() -> bytes:
    """Return the header bytes of an empty slot, which names no block."""
    return _VOID


def _read_into(fd: int, parts: Parts, offset: int) -> None:
    # Read the bytes of all parts; a short file leaves the rest of them unchanged.
    left = [part for part in parts if part.nbytes]
    while left:
        count = os.preadv(fd, left[:64], offset)
        if not count:
            return
        offset += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
