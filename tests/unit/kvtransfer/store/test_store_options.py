"""Tests of how many blocks fit into a KV store of a given size, beside its index."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from kvtransfer.store.__main__ import size
from kvtransfer.store.store_index import StoreIndex
from kvtransfer.store.store_options import StoreOptions
from kvtransfer.store.tier_index import INDEX_BYTES


@pytest.mark.parametrize("slot_bytes", [1, 4096, 5000, 1 << 21])
def test_files_and_indexes_stay_within_the_bounds(slot_bytes: int) -> None:
    options = StoreOptions(
        slot_bytes=slot_bytes, memory_bytes=64 << 20, disk_bytes=128 << 20, directory="d"
    )
    memory, disk = options.memory_geometry, options.disk_geometry
    assert disk is not None
    index_bytes = (memory.slots + disk.slots) * INDEX_BYTES
    assert memory.file_bytes + index_bytes <= 64 << 20
    assert disk.file_bytes <= 128 << 20
    # One more slot would not fit, so no memory is wasted.
    spare = (64 << 20) - memory.file_bytes - index_bytes
    assert spare < memory.stride + 128 + INDEX_BYTES + 2 * 4096


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"memory_bytes": 4096}, "memory of the store has no room"),
        ({"disk_bytes": 4096, "directory": "d"}, "disk of the store has no room"),
        ({"disk_bytes": 1 << 40, "directory": "d"}, "memory of the store has no room"),
        ({"directory": "d"}, "both a directory and a size"),
        ({"disk_bytes": 1 << 20}, "both a directory and a size"),
        ({"lease_s": 0.0}, "positive"),
        ({"max_clients": 0}, "positive"),
    ],
)
def test_bounds_that_leave_no_room_are_refused(change: dict[str, object], problem: str) -> None:
    values: dict[str, object] = {"slot_bytes": 65536, "memory_bytes": 1 << 20}
    with pytest.raises(ValueError, match=problem):
        StoreOptions(**{**values, **change})  # type: ignore[arg-type]


def test_the_index_takes_no_more_memory_than_the_bound_reserves_for_it() -> None:
    slots = 5_000
    tracemalloc.start()
    index = StoreIndex(slots, slots)
    for _ in range(slots):
        key = os.urandom(32)
        index.begin_write(key, 0.0)
        index.end_write(key, is_complete=True)
    while (copy := index.begin_save()) is not None:
        index.end_save(copy, is_complete=True)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index.disk) == slots
    assert used <= 2 * slots * INDEX_BYTES


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("64KiB", 65536), ("3MiB", 3 << 20), ("2GiB", 2 << 30)]
)
def test_sizes_have_binary_units(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "1GB", "-1", "1.5GiB", "GiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size(text)
