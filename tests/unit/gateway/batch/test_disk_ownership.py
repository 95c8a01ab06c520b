"""Tests that one gateway at a time runs a batch, and that another takes over when it exits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.batch.disk_ownership import BatchOwner
from gateway.batch.storage_interface import LeaseLostError

LEASE_S = 30.0


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    folder = tmp_path / "batch"
    folder.mkdir()
    return folder


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[tuple[BatchOwner, BatchOwner]]:
    folder = tmp_path / "owners"
    folder.mkdir()
    pair = BatchOwner(folder, LEASE_S), BatchOwner(folder, LEASE_S)
    for owner in pair:
        owner.open()
    yield pair
    for owner in pair:
        owner.close()


def test_a_second_owner_is_refused_until_the_lease_ends(
    owners: tuple[BatchOwner, BatchOwner], batch: Path
) -> None:
    first, second = owners
    assert first.claim(batch, 1000.0)
    assert not second.claim(batch, 1029.0)
    assert first.claim(batch, 1029.0)
    assert not second.claim(batch, 1058.0)
    assert second.claim(batch, 1060.0)
    assert not first.claim(batch, 1061.0)


def test_the_batches_of_an_owner_that_ended_are_free_at_once(
    owners: tuple[BatchOwner, BatchOwner], batch: Path
) -> None:
    first, second = owners
    assert first.claim(batch, 1000.0)
    first.close()
    assert second.claim(batch, 1000.1)


def test_a_released_batch_is_free_and_releasing_anothers_does_nothing(
    owners: tuple[BatchOwner, BatchOwner], batch: Path
) -> None:
    first, second = owners
    assert first.claim(batch, 1000.0)
    second.release(batch)
    assert not second.claim(batch, 1001.0)
    first.release(batch)
    assert second.claim(batch, 1001.0)


def test_only_the_holder_of_the_lease_may_change_a_batch(
    owners: tuple[BatchOwner, BatchOwner], batch: Path
) -> None:
    first, second = owners
    changes: list[str] = []
    assert first.claim(batch, 1000.0)
    first.change(batch, lambda: changes.append("first"))
    assert second.claim(batch, 1060.0)
    with pytest.raises(LeaseLostError):
        first.change(batch, lambda: changes.append("late"))
    second.change(batch, lambda: changes.append("second"))
    assert changes == ["first", "second"]


def test_a_damaged_lease_counts_as_none(owners: tuple[BatchOwner, BatchOwner], batch: Path) -> None:
    (batch / "owner").write_bytes(b'{"owner": "x')
    assert owners[0].claim(batch, 1000.0)


def test_a_new_owner_deletes_the_files_of_those_that_ended(
    owners: tuple[BatchOwner, BatchOwner], tmp_path: Path
) -> None:
    (tmp_path / "owners" / "left-over").touch()
    third = BatchOwner(tmp_path / "owners", LEASE_S)
    third.open()
    names = {path.name for path in (tmp_path / "owners").iterdir()}
    third.close()
    assert names == {third.name, *(owner.name for owner in owners)}
