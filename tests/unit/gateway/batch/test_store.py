"""Tests of files and batches stored on disk: quotas, expiry, and what a crash leaves behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.batch.records import BatchRecord, BatchState, FileRecord, new_id
from gateway.batch.store import (
    STALE_UPLOAD_S,
    BatchStore,
    JournalFile,
    StorageFullError,
)

NOW = 1_800_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    store = BatchStore(tmp_path / "store")
    store.create()
    return store


def put(store: BatchStore, tenant: str, content: bytes, expires_at: float = NOW + 10) -> FileRecord:
    upload = store.start_upload(tenant, 3, 100)
    upload.write(content)
    size, at = len(content), int(expires_at)
    record = FileRecord(new_id("file-"), "a.jsonl", "batch", size, int(NOW), at)
    store.commit_upload(tenant, upload, record)
    upload.close()
    return record


def batch_of(store: BatchStore, tenant: str, file: FileRecord) -> BatchRecord:
    batch_id, now = new_id("batch_"), int(NOW)
    record = BatchRecord(batch_id, tenant, "", "/v1/embeddings", file.id, "24h", now, now + 60)
    store.create_batch(record)
    return record


def test_a_file_belongs_to_one_tenant_and_survives_its_commit(store: BatchStore) -> None:
    record = put(store, "acme", b"one")
    assert store.file("acme", record.id) == record
    assert store.content("acme", record.id).read_bytes() == b"one"
    assert store.file("rival", record.id) is None
    assert store.files("rival") == []


@pytest.mark.parametrize("file_id", ["", "..", "../x", "file-", "file-" + "0" * 31 + "/"])
def test_an_id_of_another_form_names_no_file(store: BatchStore, file_id: str) -> None:
    assert store.file("acme", file_id) is None
    assert store.batch("acme", file_id) is None


def test_bytes_and_number_of_files_are_limited_per_tenant(store: BatchStore) -> None:
    put(store, "acme", b"x" * 60)
    upload = store.start_upload("acme", 3, 100)
    with pytest.raises(StorageFullError):
        upload.write(b"x" * 41)
    upload.close()
    put(store, "acme", b"x")
    put(store, "acme", b"x")
    with pytest.raises(StorageFullError):
        store.start_upload("acme", 3, 100)
    put(store, "rival", b"x" * 60)


def test_uploads_at_the_same_time_stay_within_the_quota_together(store: BatchStore) -> None:
    uploads = [store.start_upload("acme", 3, 100) for _ in range(2)]
    records = [
        FileRecord(new_id("file-"), "a", "batch", 60, int(NOW), int(NOW) + 9) for _ in uploads
    ]
    for upload in uploads:
        upload.write(b"x" * 60)
    store.commit_upload("acme", uploads[0], records[0])
    with pytest.raises(StorageFullError):
        store.commit_upload("acme", uploads[1], records[1])
    uploads[1].close()
    assert [file.id for file in store.files("acme")] == [records[0].id]
    assert not uploads[1].path.exists()


def test_an_upload_that_is_not_committed_leaves_nothing(store: BatchStore) -> None:
    upload = store.start_upload("acme", 3, 100)
    upload.write(b"x")
    assert upload.path.exists()
    upload.close()
    assert not upload.path.exists()


def test_expired_files_and_leftovers_are_deleted_and_others_stay(store: BatchStore) -> None:
    old, new = put(store, "acme", b"x", NOW - 1), put(store, "acme", b"y")
    upload = store.start_upload("acme", 3, 100)
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
    store: BatchStore,
) -> None:
    file = put(store, "acme", b"x")
    content = store.content("acme", file.id)
    content.with_suffix(".json").unlink()
    os.utime(content, (NOW, NOW))
    store.delete_expired(NOW, 10.0)
    assert content.exists()
    store.delete_expired(NOW + STALE_UPLOAD_S + 1, 10.0)
    assert not content.exists()


def test_a_batch_whose_creator_was_killed_runs_or_is_deleted(store: BatchStore) -> None:
    file = put(store, "acme", b"x", NOW + STALE_UPLOAD_S + 9)
    stored, unstored = batch_of(store, "acme", file), batch_of(store, "acme", file)
    for record in (stored, unstored):
        (store.folder / "open" / record.id).unlink()
    folder = store.batch_folder("acme", unstored.id)
    (folder / "record.json").unlink()
    os.utime(folder, (NOW, NOW))
    store.delete_expired(NOW, 10.0)
    assert store.open_batches() == [stored]
    assert folder.exists()
    store.delete_expired(NOW + STALE_UPLOAD_S + 1, 10.0)
    assert not folder.exists()
    assert store.open_batches() == [stored]


def test_a_batch_keeps_its_input_after_the_file_is_deleted(store: BatchStore) -> None:
    file = put(store, "acme", b"input")
    record = batch_of(store, "acme", file)
    store.delete_file("acme", file.id)
    folder = store.batch_folder("acme", record.id)
    assert (folder / "input").read_bytes() == b"input"
    assert store.open_batches() == [record]


def test_a_finished_batch_is_closed_and_deleted_after_its_time(store: BatchStore) -> None:
    record = batch_of(store, "acme", put(store, "acme", b"input"))
    ended = record.enter(BatchState.COMPLETED, NOW)
    store.save_batch(ended)
    store.close_batch(ended)
    assert store.open_batches() == []
    assert not (store.batch_folder("acme", record.id) / "input").exists()
    store.delete_expired(NOW + 9, 10.0)
    assert store.batch("acme", record.id) == ended
    store.delete_expired(NOW + 11, 10.0)
    assert store.batch("acme", record.id) is None


def test_a_requested_cancellation_is_found_again(store: BatchStore) -> None:
    record = batch_of(store, "acme", put(store, "acme", b"input"))
    assert store.cancelled_at(record) is None
    store.request_cancel(record)
    assert store.cancelled_at(record) is not None


def test_a_damaged_record_counts_as_missing(store: BatchStore) -> None:
    record = batch_of(store, "acme", put(store, "acme", b"input"))
    (store.batch_folder("acme", record.id) / "record.json").write_bytes(b"{")
    assert store.batch("acme", record.id) is None
    assert store.open_batches() == []


def test_a_journal_is_cut_to_its_complete_entries_before_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"whole\nbro")
    journal = JournalFile(path, 6)
    journal.append(b"next\n")
    journal.close()
    assert path.read_bytes() == b"whole\nnext\n"


def test_a_write_that_fails_in_part_damages_no_other_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, write = JournalFile(tmp_path / "journal", 0), os.write
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
    journal = JournalFile(tmp_path / "journal", 0)
    journal.close()
    other = (tmp_path / "other").open("wb")  # it gets the same descriptor
    with pytest.raises(OSError, match="closed"):
        journal.append(b"one\n")
    other.close()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_result_file_is_replaced_when_it_is_written_again(store: BatchStore) -> None:
    record = FileRecord("file-" + "0" * 32, "out", "batch_output", 0, int(NOW), int(NOW) + 9)
    assert store.write_result_file("acme", record, iter([b"a\n", b"b\n"])) == 4
    assert store.write_result_file("acme", record, iter([b"c\n"])) == 2
    assert store.content("acme", record.id).read_bytes() == b"c\n"
    (found,) = store.files("acme")
    assert found.size == 2
    other = "file-" + "1" * 32
    assert store.write_result_file("acme", FileRecord(other, "e", "x", 0, 0, 0), iter([])) == 0
    assert store.file("acme", other) is None
