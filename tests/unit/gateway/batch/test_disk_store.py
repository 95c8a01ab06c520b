"""Tests that batches on disk survive a crash, a killed process, and a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.batch.disk_batch import JournalFile
from gateway.batch.disk_store import DiskStore
from gateway.batch.file_and_batch_objects import BatchRecord, FileRecord, new_id
from gateway.batch.storage_interface import STALE_UPLOAD_S, StorageQuota

NOW = 1_800_000_000.0
QUOTA = StorageQuota(9, 100, 100)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore(tmp_path / "store", 30.0, lambda: NOW)
    store.open()
    return store


def put(store: DiskStore, tenant: str, content: bytes, expires_at: float = NOW + 10) -> FileRecord:
    upload = store.start_upload(tenant, QUOTA)
    upload.write(content)
    size, at = len(content), int(expires_at)
    record = FileRecord(upload.id, "a.jsonl", "batch", size, int(NOW), at)
    store.commit_upload(tenant, upload, record)
    upload.close()
    return record


def call(change: Callable[[], None]) -> None:
    # Stand in for a lease that this process holds.
    change()


def batch_of(store: DiskStore, tenant: str, file: FileRecord) -> BatchRecord:
    batch_id, now = new_id("batch_"), int(NOW)
    record = BatchRecord(batch_id, tenant, "", "/v1/embeddings", file.id, "24h", now, now + 60)
    store.create_batch(record)
    return record


def test_an_upload_that_is_not_committed_leaves_nothing(store: DiskStore) -> None:
    upload = store.start_upload("acme", QUOTA)
    upload.write(b"x")
    assert upload.path.exists()
    upload.close()
    assert not upload.path.exists()


def test_an_upload_is_taken_while_another_file_is_deleted(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "acme", b"x")
    refused = store.start_upload("acme", QUOTA)
    scandir = os.scandir

    def scan_and_delete(folder: Path) -> list[os.DirEntry[str]]:
        found = list(scandir(folder))
        refused.close()
        return found

    monkeypatch.setattr("gateway.batch.disk_store.os.scandir", scan_and_delete)
    file = put(store, "acme", b"y")
    assert store.file("acme", file.id) == file


def test_expired_files_and_leftovers_are_deleted_and_others_stay(store: DiskStore) -> None:
    old, new = put(store, "acme", b"x", NOW - 1), put(store, "acme", b"y")
    upload = store.start_upload("acme", QUOTA)
    upload.sync()
    os.utime(upload.path, (NOW, NOW))
    store.delete_expired(NOW, 10.0)
    assert store.file("acme", old.id) is None
    assert not store.content("acme", old.id).exists()
    assert store.file("acme", new.id) == new
    assert upload.path.exists()
    os.utime(upload.path, (NOW - STALE_UPLOAD_S - 1,) * 2)
    store.delete_expired(NOW, 10.0)
    assert not upload.path.exists()


def test_content_without_a_record_is_deleted_when_no_process_can_still_be_writing_it(
    store: DiskStore,
) -> None:
    file = put(store, "acme", b"x")
    content = store.content("acme", file.id)
    content.with_suffix(".json").unlink()
    os.utime(content, (NOW, NOW))
    store.delete_expired(NOW, 10.0)
    assert content.exists()
    store.delete_expired(NOW + STALE_UPLOAD_S + 1, 10.0)
    assert not content.exists()


def test_a_batch_whose_creator_was_killed_runs_or_is_deleted(store: DiskStore) -> None:
    file = put(store, "acme", b"x", NOW + STALE_UPLOAD_S + 9)
    stored, unstored = batch_of(store, "acme", file), batch_of(store, "acme", file)
    for record in (stored, unstored):
        (store.folder / "open" / record.id).unlink()
    folder = store.batch_folder("acme", unstored.id)
    (folder / "record.json").unlink()
    os.utime(folder, (NOW, NOW))
    store.delete_expired(NOW, 10.0)
    assert [batch.id for batch in store.open_batches()] == [stored.id]
    assert folder.exists()
    store.delete_expired(NOW + STALE_UPLOAD_S + 1, 10.0)
    assert not folder.exists()
    assert [batch.id for batch in store.open_batches()] == [stored.id]


def test_a_damaged_record_counts_as_missing(store: DiskStore) -> None:
    record = batch_of(store, "acme", put(store, "acme", b"input"))
    (store.batch_folder("acme", record.id) / "record.json").write_bytes(b"{")
    assert store.batch("acme", record.id) is None
    assert store.open_batches() == []


def test_a_journal_is_cut_to_its_complete_entries_before_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"whole\nbro")
    journal = JournalFile(path, 6, call)
    journal.append(b"next\n")
    journal.close()
    assert path.read_bytes() == b"whole\nnext\n"


def test_a_write_that_fails_in_part_damages_no_other_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, write = JournalFile(tmp_path / "journal", 0, call), os.write
    journal.append(b"one\n")
    results = iter([4, OSError("full")])

    def fail_in_part(fd: int, data: memoryview) -> int:
        result = next(results)
        if isinstance(result, OSError):
            raise result
        return write(fd, data[:result])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail_in_part)
        with pytest.raises(OSError, match="full"):
            journal.append(b"two two\n")
    journal.append(b"two two\n")
    journal.append(b"three\n")
    journal.close()
    assert (tmp_path / "journal").read_bytes() == b"one\ntwo \ntwo two\nthree\n"


def test_a_closed_journal_writes_to_no_other_file(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "journal", 0, call)
    journal.close()
    # The other file gets the descriptor that the journal had.
    other = (tmp_path / "other").open("wb")
    with pytest.raises(OSError, match="closed"):
        journal.append(b"one\n")
    other.close()
    assert (tmp_path / "other").read_bytes() == b""
