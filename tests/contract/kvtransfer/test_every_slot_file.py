"""Tests that every kind of file in which a KV store keeps its blocks must pass: memory and disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.store.disk_slots import FILE_NAME, DiskSlots
from kvtransfer.store.memory_slots import MemorySlots
from kvtransfer.store.slot_format import (
    HEADER_BYTES,
    SlotFile,
    SlotFileError,
    SlotGeometry,
    SlotHeader,
    SlotReader,
    digest_of,
)

GEOMETRY = SlotGeometry(5, 6000)
KEY, OTHER = b"k" * 32, b"o" * 32
DATA = os.urandom(6000)


@pytest.fixture(params=["memory", "disk"])
def slots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlotFile]:
    opened: SlotFile
    opened = MemorySlots(GEOMETRY) if request.param == "memory" else DiskSlots(tmp_path, GEOMETRY)
    yield opened
    opened.close()


def put(slots: SlotFile, slot: int, key: bytes, data: bytes) -> None:
    slots.void(slot)
    slots.write(slot, memoryview(data))
    slots.commit(slot, key, len(data), digest_of([memoryview(data)]))


def read(slots: SlotFile, slot: int, key: bytes, length: int) -> bytes | None:
    copy = bytearray(length)
    parts = [memoryview(copy)[: length // 3], memoryview(copy)[length // 3 :]]
    outcome = slots.read(slot, key, parts)
    assert outcome.is_current or not outcome.is_intact
    return bytes(copy) if outcome.is_intact else None


def descriptor(slots: SlotFile) -> int:
    # Return the file descriptor that a reader in another process would use.
    return slots.fd if isinstance(slots, MemorySlots) else slots._fd


def test_a_committed_block_is_read_back_in_any_division(slots: SlotFile) -> None:
    for slot in range(GEOMETRY.slots):
        put(slots, slot, bytes([slot]) * 32, DATA[: 6000 - slot])
    for slot in range(GEOMETRY.slots):
        assert read(slots, slot, bytes([slot]) * 32, 6000 - slot) == DATA[: 6000 - slot]


def test_an_empty_block_and_a_full_slot_are_blocks_too(slots: SlotFile) -> None:
    put(slots, 0, KEY, b"")
    put(slots, 1, OTHER, DATA)
    assert read(slots, 0, KEY, 0) == b""
    assert read(slots, 1, OTHER, 6000) == DATA


def test_nothing_is_readable_before_the_commit(slots: SlotFile) -> None:
    assert read(slots, 2, KEY, 6000) is None
    slots.void(2)
    slots.write(2, memoryview(DATA))
    assert read(slots, 2, KEY, 6000) is None
    assert slots.header(2) is None


def test_a_void_slot_does_not_show_its_last_block(slots: SlotFile) -> None:
    put(slots, 2, KEY, DATA)
    slots.void(2)
    assert read(slots, 2, KEY, 6000) is None
    put(slots, 2, OTHER, DATA)
    assert read(slots, 2, KEY, 6000) is None


def test_a_block_of_another_length_is_not_read(slots: SlotFile) -> None:
    put(slots, 0, KEY, DATA[:5000])
    assert read(slots, 0, KEY, 5001) is None
    assert read(slots, 0, KEY, 4999) is None


def test_a_wrong_byte_is_noticed(slots: SlotFile) -> None:
    slots.void(0)
    slots.write(0, memoryview(DATA[:100] + b"\0" + DATA[101:] if DATA[100] else b"\1" + DATA[1:]))
    slots.commit(0, KEY, 6000, digest_of([memoryview(DATA)]))
    assert read(slots, 0, KEY, 6000) is None


def test_a_reader_that_is_overtaken_by_a_writer_notices_it(slots: SlotFile) -> None:
    class Overtaken(SlotReader):
        # The owner reuses the slot between the reader's two looks at the header.
        looks, new_key = 0, KEY

        def header(self, slot: int) -> SlotHeader | None:
            self.looks += 1
            if self.looks == 2:
                put(slots, slot, self.new_key, DATA)
            return super().header(slot)

    for new_key in (OTHER, KEY):
        put(slots, 0, KEY, DATA)
        copy = bytearray(6000)
        reader = Overtaken(descriptor(slots), GEOMETRY)
        reader.new_key = new_key
        outcome = reader.read(0, KEY, [memoryview(copy)])
        assert not outcome.is_current, "even if the new block has the same key"
        assert not outcome.is_intact


def test_each_commit_has_another_generation(slots: SlotFile) -> None:
    seen = []
    for slot in (0, 1, 0):
        put(slots, slot, KEY, DATA)
        header = slots.header(slot)
        assert header is not None
        seen.append(header.generation)
    assert seen == sorted(set(seen))


def test_another_process_reads_by_the_descriptor_and_cannot_write_memory(slots: SlotFile) -> None:
    put(slots, 3, KEY, DATA)
    copy = bytearray(6000)
    reader = SlotReader(descriptor(slots), GEOMETRY)
    assert reader.read(3, KEY, [memoryview(copy)]).is_intact
    assert copy == DATA
    assert [slot for slot, _ in reader.headers()] == [3]
    if isinstance(slots, MemorySlots):
        with pytest.raises(PermissionError):
            os.pwrite(slots.fd, b"x", GEOMETRY.data_offset(3))
        with pytest.raises(PermissionError):
            os.ftruncate(slots.fd, 0)


# The disk alone: restarts


def test_a_restarted_store_finds_its_blocks_in_the_order_of_their_writes(tmp_path: Path) -> None:
    first = DiskSlots(tmp_path, GEOMETRY)
    for slot, key in ((4, KEY), (0, OTHER), (2, b"x" * 32)):
        put(first, slot, key, DATA)
    first.void(2)
    first.write(2, memoryview(DATA))  # the process is killed before it commits the block
    first.close()
    again = DiskSlots(tmp_path, GEOMETRY)
    assert list(again.restored()) == [(4, KEY), (0, OTHER)]
    assert read(again, 4, KEY, 6000) == DATA
    put(again, 1, KEY, DATA[:10])
    again.close()
    third = DiskSlots(tmp_path, GEOMETRY)
    assert list(third.restored()) == [(0, OTHER), (1, KEY)], "the newer of two copies"
    third.close()


@pytest.mark.parametrize("change", ["header", "geometry", "form", "short"])
def test_what_a_restarted_store_cannot_trust_is_not_found(tmp_path: Path, change: str) -> None:
    first = DiskSlots(tmp_path, GEOMETRY)
    put(first, 1, KEY, DATA)
    first.close()
    path, geometry = tmp_path / FILE_NAME, GEOMETRY
    content = bytearray(path.read_bytes())
    if change == "header":
        content[GEOMETRY.header_offset(1) + 20] ^= 1
    elif change == "form":
        content[3] ^= 1
    elif change == "geometry":
        geometry = SlotGeometry(6, 6000)
    else:
        del content[GEOMETRY.header_offset(1) + HEADER_BYTES // 2 :]
    path.write_bytes(content)
    again = DiskSlots(tmp_path, geometry)
    assert list(again.restored()) == []
    put(again, 1, OTHER, DATA)
    assert read(again, 1, OTHER, 6000) == DATA
    again.close()


def test_a_directory_has_one_store(tmp_path: Path) -> None:
    first = DiskSlots(tmp_path, GEOMETRY)
    with pytest.raises(SlotFileError, match="another store"):
        DiskSlots(tmp_path, GEOMETRY)
    first.close()
    DiskSlots(tmp_path, GEOMETRY).close()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 1), (1, 0), (1 << 25, 1), (1, 1 << 31)])
def test_impossible_geometries_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="are impossible"):
        SlotGeometry(slots, slot_bytes)
