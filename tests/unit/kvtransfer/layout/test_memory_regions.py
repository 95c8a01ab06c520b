"""Tests of KV memory: files that other agents can only read, and the reuse counters of blocks."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region, RegionError


@pytest.fixture
def region() -> Iterator[Region]:
    region = MemoryFileRegion.create(10, 1000, name="rank-0")
    yield region
    region.close()


def attached(region: Region, blocks: int = 10) -> Region:
    assert region.fd is not None
    return MemoryFileRegion.attach(os.dup(region.fd), blocks, 1000, name="peer")


def test_a_peer_sees_bytes_and_generations_change(region: Region) -> None:
    peer = attached(region)
    region.bytes[4321] = 7
    region.bump([3, 4])
    assert peer.bytes[4321] == 7
    assert peer.generations.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert (peer.blocks, peer.bytes.size) == (10, 10_000)
    peer.close()


def test_a_peer_cannot_write_by_any_means(region: Region) -> None:
    peer = attached(region)
    with pytest.raises(ValueError, match="read-only"):
        peer.bytes[0] = 1
    assert peer.fd is not None
    with pytest.raises(PermissionError):
        mmap.mmap(peer.fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(peer.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(peer.fd, 4096)
    peer.close()


def test_a_peer_cannot_make_its_mapping_writable_later_nor_reopen_the_file_for_writing(
    region: Region,
) -> None:
    peer = attached(region)
    libc = ctypes.CDLL(None, use_errno=True)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    assert libc.mprotect(ctypes.c_void_p(peer.address), ctypes.c_size_t(4096), protection) == -1
    assert ctypes.get_errno() == errno.EACCES
    again = os.open(f"/proc/self/fd/{peer.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 4096, flags=mmap.MAP_SHARED, prot=protection)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)
    peer.close()


def test_the_owner_goes_on_writing_behind_the_seal(region: Region) -> None:
    region.bytes[:] = 255
    region.bump(range(10))
    assert (region.bytes.min(), region.generations.min()) == (255, 1)


def test_a_file_that_could_shrink_or_is_of_another_size_is_refused(region: Region) -> None:
    with pytest.raises(RegionError, match="bytes instead"):
        attached(region, blocks=11)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 12 * 1024 + 40)
    with pytest.raises(RegionError, match="must have the seals"):
        MemoryFileRegion.attach(loose, 10, 1000, name="loose")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(loose)


@pytest.mark.parametrize("blocks", [0, -1])
def test_a_file_of_no_blocks_is_closed_as_every_other_that_is_refused(
    region: Region, blocks: int
) -> None:
    assert region.fd is not None
    theirs = os.dup(region.fd)
    with pytest.raises(RegionError):
        MemoryFileRegion.attach(theirs, blocks, 1000, name="peer")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(theirs)


def test_current_holds_until_one_of_the_blocks_changes_owner(region: Region) -> None:
    blocks = np.array([7, 2, 5])
    promised = region.generations_of(blocks)
    region.bump([1, 3])
    assert region.are_current(blocks, promised)
    region.bump([5])
    assert not region.are_current(blocks, promised)


def test_a_block_listed_twice_is_bumped_once_and_generations_wrap_around(region: Region) -> None:
    region.generations[4] = 0xFFFF_FFFF
    region.bump([4, 4, 6, 6])
    assert region.generations[[4, 6]].tolist() == [0, 1]


def test_memory_of_the_engine_is_used_as_it_is() -> None:
    memory = bytearray(4000)
    region = Region.over(memory, 1000, name="engine")
    region.bytes[2000] = 9
    assert (memory[2000], region.blocks, region.fd) == (9, 4, None)
    with pytest.raises(RegionError, match="be writable and consist of blocks"):
        Region.over(bytearray(999), 1000, name="engine")
    with pytest.raises(RegionError, match="be writable and consist of blocks"):
        Region.over(memoryview(bytes(1000)), 1000, name="engine")


def test_the_address_is_that_of_the_first_byte(region: Region) -> None:
    assert region.address == region.bytes.ctypes.data
    assert region.address % mmap.PAGESIZE == 0


def test_closing_leaves_views_of_others_readable(region: Region) -> None:
    view = region.bytes[:10]
    region.close()
    region.close()
    assert (view.sum(), region.fd, region.bytes.size) == (0, None, 0)


def test_a_region_without_blocks_is_refused() -> None:
    with pytest.raises(RegionError, match="not 0 blocks"):
        MemoryFileRegion.create(0, 1000, name="none")
