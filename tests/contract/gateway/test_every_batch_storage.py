"""Contract tests that every implementation of the Batch API's storage must pass.

Add a new implementation to the `place` fixture.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from uuid import uuid4

import pytest

from gateway.batch.disk_store import DiskStore
from gateway.batch.file_and_batch_objects import BatchRecord, BatchState, FileRecord, new_id
from gateway.batch.result_journal import JournalEntry, JournalReader, encode_entry
from gateway.batch.s3_bucket import S3Bucket
from gateway.batch.s3_store import S3Store
from gateway.batch.storage_interface import (
    STALE_UPLOAD_S,
    BatchStorage,
    ClaimedBatch,
    LeaseLostError,
    OpenBatch,
    StorageFullError,
    StorageQuota,
)
from gateway.config import BatchS3
from tests.s3_server import BUCKET, KEYS, s3_process

LEASE_S = 30.0
QUOTA = StorageQuota(3, 100, 1000)
MIB = 1024 * 1024


class Place:
    """A place where files and batches are stored, such as a folder.

    Each call of storage() acts as another gateway process.
    Each such process has its own clock.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self._opened: list[BatchStorage] = []

    def storage(self) -> BatchStorage:
        storage = self.create()
        storage.open()
        self._opened.append(storage)
        return storage

    def create(self) -> BatchStorage:
        raise NotImplementedError

    def close(self) -> None:
        for storage in self._opened:
            storage.close()

    @property
    def clock(self) -> float:
        return self.now


class DiskPlace(Place):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def create(self) -> BatchStorage:
        return DiskStore(self._folder, LEASE_S, lambda: self.now)


class S3Place(Place):
    def __init__(self, url: str, prefix: str) -> None:
        super().__init__()
        keys = {"access_key_id": KEYS["AWS_ACCESS_KEY_ID"]}
        keys |= {"secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"]}
        self._section = BatchS3(
            bucket=BUCKET, prefix=prefix, endpoint_url=url, region="us-east-1", **keys
        )

    def create(self) -> BatchStorage:
        return S3Store(S3Bucket(self._section), LEASE_S, lambda: self.now)


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_process() as url:
        yield url


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made: Place
    if request.param == "disk":
        made = DiskPlace(tmp_path / "store")
    else:
        made = S3Place(request.getfixturevalue("s3_url"), f"test-{uuid4()}")
    yield made
    made.close()


@pytest.fixture
def storage(place: Place) -> BatchStorage:
    return place.storage()


def put(
    storage: BatchStorage,
    tenant: str,
    content: bytes,
    quota: StorageQuota = QUOTA,
    expires_at: float | None = None,
) -> FileRecord:
    upload = storage.start_upload(tenant, quota)
    try:
        upload.write(content)
        now = int(time.time())
        ends = now + 1000 if expires_at is None else int(expires_at)
        record = FileRecord(upload.id, "a.jsonl", "batch", upload.size, now, ends)
        storage.commit_upload(tenant, upload, record)
    finally:
        upload.close()
    return record


def content(storage: BatchStorage, tenant: str, file_id: str) -> bytes:
    with storage.open_content(tenant, file_id) as file:
        return file.read()


def new_batch(storage: BatchStorage, tenant: str = "acme", data: bytes = b"a\nb\n") -> BatchRecord:
    file = put(storage, tenant, data)
    batch_id, now = new_id("batch_"), int(time.time())
    record = BatchRecord(batch_id, tenant, "", "/v1/embeddings", file.id, "24h", now, now + 60)
    storage.create_batch(record)
    storage.delete_file(tenant, file.id)
    return record


def only_open(storage: BatchStorage) -> OpenBatch:
    (batch,) = storage.open_batches()
    return batch


def claim(storage: BatchStorage) -> ClaimedBatch:
    claimed = storage.claim(only_open(storage))
    assert claimed is not None
    return claimed


def wait_for_lease(place: Place, storage: BatchStorage) -> ClaimedBatch:
    # Look at the only batch as a gateway does, until its lease has ended; return the new claim.
    ends = place.now + 3 * LEASE_S
    while place.now < ends:
        claimed = storage.claim(only_open(storage))
        if claimed is not None:
            return claimed
        place.now += LEASE_S / 10
    raise AssertionError("the lease of the batch did not expire within the time limit")


def result(number: int, text: str) -> bytes:
    return encode_entry(JournalEntry(number, True, text))


def read_results(batch: ClaimedBatch) -> list[str]:
    reader = JournalReader(8)
    entries = [reader.feed(line) for line in batch.journal_lines()]
    return [entry.result for entry in entries if entry is not None]


# Files


def test_a_file_belongs_to_one_tenant(storage: BatchStorage) -> None:
    record = put(storage, "acme", b"one")
    assert storage.file("acme", record.id) == record
    assert content(storage, "acme", record.id) == b"one"
    assert storage.file("rival", record.id) is None
    assert storage.files("rival") == []
    with pytest.raises(FileNotFoundError):
        storage.open_content("rival", record.id)


def test_a_file_is_seen_by_every_process_until_it_is_deleted(place: Place) -> None:
    first, second = place.storage(), place.storage()
    record = put(first, "acme", b"one")
    assert second.files("acme") == [record]
    second.delete_file("acme", record.id)
    assert first.file("acme", record.id) is None
    assert first.files("acme") == []
    with pytest.raises(FileNotFoundError):
        first.open_content("acme", record.id)


@pytest.mark.parametrize("name", ["", "..", "../x", "file-", "file-" + "0" * 31 + "/"])
def test_an_id_of_another_form_names_nothing(storage: BatchStorage, name: str) -> None:
    assert storage.file("acme", name) is None
    assert storage.batch("acme", name) is None


def test_bytes_and_number_of_files_are_limited_per_tenant(storage: BatchStorage) -> None:
    put(storage, "acme", b"x" * 60)
    upload = storage.start_upload("acme", QUOTA)
    with pytest.raises(StorageFullError):
        upload.write(b"x" * 41)
    upload.close()
    put(storage, "acme", b"x" * 39)
    put(storage, "acme", b"x")
    with pytest.raises(StorageFullError):
        storage.start_upload("acme", QUOTA)
    put(storage, "rival", b"x" * 60)


@pytest.mark.parametrize(("count", "size"), [(2, 60), (4, 1)])
def test_uploads_of_two_processes_stay_within_the_quota_together(
    place: Place, count: int, size: int
) -> None:
    storages = [place.storage() for _ in range(count)]
    uploads = []
    for storage in storages:
        with suppress(StorageFullError):
            uploads.append((storage, storage.start_upload("acme", QUOTA)))
    now = int(time.time())
    for storage, upload in uploads:
        upload.write(b"x" * size)
        record = FileRecord(upload.id, "a", "batch", size, now, now + 9)
        with suppress(StorageFullError):
            storage.commit_upload("acme", upload, record)
        upload.close()
    assert len(storages[0].files("acme")) == count - 1


def test_an_upload_that_is_not_committed_takes_no_quota(storage: BatchStorage) -> None:
    for _ in range(2 * QUOTA.files):
        upload = storage.start_upload("acme", StorageQuota(3, 100 * MIB, 100 * MIB))
        upload.write(b"x" * 6 * MIB)
        upload.close()
    assert storage.files("acme") == []
    put(storage, "acme", b"x" * QUOTA.total_bytes)


def test_a_large_file_is_read_as_it_was_written(storage: BatchStorage) -> None:
    quota = StorageQuota(3, 100 * MIB, 100 * MIB)
    data = b"".join(number.to_bytes(8, "big") for number in range(13 * MIB // 8))
    upload = storage.start_upload("acme", quota)
    for start in range(0, len(data), 256 * 1024 + 1):
        upload.write(data[start : start + 256 * 1024 + 1])
    record = FileRecord(upload.id, "a", "batch", upload.size, 0, 2**40)
    storage.commit_upload("acme", upload, record)
    upload.close()
    with storage.open_content("acme", record.id) as file:
        pieces = list(iter(lambda: file.read(256 * 1024), b""))
        assert b"".join(pieces) == data
        file.seek(9 * MIB)
        assert file.read(16) == data[9 * MIB : 9 * MIB + 16]


def test_an_empty_file_is_a_file(storage: BatchStorage) -> None:
    record = put(storage, "acme", b"")
    assert content(storage, "acme", record.id) == b""


def test_results_are_a_file_unless_there_are_none(storage: BatchStorage) -> None:
    ids = [new_id("file-"), new_id("file-")]
    records = [FileRecord(name, "out", "batch_output", 0, 0, 2**40) for name in ids]
    lines = [b"a\n", b"b\n"]
    assert storage.write_result_file("acme", records[0], iter(lines), 100) == 4
    assert storage.write_result_file("acme", records[1], iter([]), 100) == 0
    (found,) = storage.files("acme")
    assert (found.id, found.size) == (ids[0], 4)
    assert content(storage, "acme", ids[0]) == b"a\nb\n"


def test_results_that_break_off_leave_no_file(storage: BatchStorage) -> None:
    def lines() -> Iterator[bytes]:
        for _ in range(6):
            yield b"x" * MIB
        raise OSError("the test's storage refuses to read the journal of the batch")

    record = FileRecord(new_id("file-"), "out", "batch_output", 0, 0, 2**40)
    with pytest.raises(OSError, match="journal"):
        storage.write_result_file("acme", record, lines(), 100)
    assert storage.files("acme") == []
    with pytest.raises(FileNotFoundError):
        storage.open_content("acme", record.id)


# Batches


def test_a_batch_keeps_its_input_after_the_file_is_deleted(storage: BatchStorage) -> None:
    record = new_batch(storage)
    claimed = claim(storage)
    assert claimed.record == record
    with claimed.open_input() as file:
        assert list(file) == [b"a\n", b"b\n"]
    assert claimed.read_input(2, 2) == b"b\n"


def test_a_batch_of_an_unknown_file_is_not_created(storage: BatchStorage) -> None:
    name = new_id("file-")
    record = BatchRecord(new_id("batch_"), "acme", "", "/v1/embeddings", name, "24h", 0, 60)
    with pytest.raises(FileNotFoundError):
        storage.create_batch(record)
    assert storage.open_batches() == []
    assert storage.batch("acme", record.id) is None


def test_batches_are_listed_newest_first_for_their_tenant_alone(place: Place) -> None:
    first, second = place.storage(), place.storage()
    records = [new_batch(first), new_batch(second), new_batch(second, "rival")]
    listed = first.batches("acme")
    assert {batch.id for batch in listed} == {records[0].id, records[1].id}
    assert [(b.created_at, b.id) for b in listed] == sorted(
        ((b.created_at, b.id) for b in listed), reverse=True
    )
    assert {batch.id for batch in first.open_batches()} == {record.id for record in records}
    assert first.batch("rival", records[0].id) is None


def test_a_requested_cancellation_is_seen_by_every_process(place: Place) -> None:
    first, second = place.storage(), place.storage()
    record = new_batch(first)
    assert first.cancelled_at(record) is None
    second.request_cancel(record)
    assert first.cancelled_at(record) == pytest.approx(time.time(), abs=60)
    shown = first.batch("acme", record.id)
    assert shown is not None
    assert shown.state is BatchState.CANCELLING
    assert second.batches("acme") == [shown]


def test_a_finished_batch_is_no_longer_open_and_deleted_after_its_time(
    storage: BatchStorage,
) -> None:
    new_batch(storage)
    claimed = claim(storage)
    claimed.open_journal(JournalReader(2)).close()
    now = time.time()
    ended = claimed.record.enter(BatchState.COMPLETED, now)
    claimed.finish(ended)
    claimed.release()
    assert storage.open_batches() == []
    storage.delete_expired(now + 5, 10.0)
    assert storage.batch("acme", ended.id) == ended
    storage.delete_expired(now + 11, 10.0)
    assert storage.batch("acme", ended.id) is None
    assert storage.batches("acme") == []


def test_expired_files_are_deleted_and_others_stay(storage: BatchStorage) -> None:
    now = time.time()
    old, new = put(storage, "acme", b"x", expires_at=now - 1), put(storage, "acme", b"y")
    storage.delete_expired(now, 10.0)
    assert storage.files("acme") == [new]
    with pytest.raises(FileNotFoundError):
        storage.open_content("acme", old.id)


def test_what_is_in_use_outlives_a_look_for_leftovers(storage: BatchStorage) -> None:
    record = new_batch(storage)
    file = put(storage, "acme", b"x", expires_at=time.time() + 2 * STALE_UPLOAD_S)
    claimed = claim(storage)
    journal = claimed.open_journal(JournalReader(2))
    journal.append(result(0, "a"))
    storage.delete_expired(time.time() + STALE_UPLOAD_S + 60, 10.0)
    assert content(storage, "acme", file.id) == b"x"
    assert claimed.read_input(0, 2) == b"a\n"
    assert read_results(claimed) == ["a"]
    assert [batch.id for batch in storage.open_batches()] == [record.id]
    journal.close()


# Ownership


def test_a_batch_has_one_owner_until_its_lease_ends(place: Place) -> None:
    first, second = place.storage(), place.storage()
    new_batch(first)
    owned = claim(first)
    assert second.claim(only_open(second)) is None
    for _ in range(20):
        place.now += LEASE_S / 3
        owned.renew()
        assert second.claim(only_open(second)) is None
    taken = wait_for_lease(place, second)
    assert taken.record == owned.record
    with pytest.raises(LeaseLostError):
        owned.renew()
    taken.renew()


def test_of_claims_at_the_same_moment_one_succeeds(place: Place) -> None:
    storages = [place.storage() for _ in range(4)]
    new_batch(storages[0])
    listed = [only_open(storage) for storage in storages]
    start = Barrier(len(storages))

    def claim_at_once(storage: BatchStorage, batch: OpenBatch) -> ClaimedBatch | None:
        start.wait()
        return storage.claim(batch)

    with ThreadPoolExecutor(len(storages)) as threads:
        for _ in range(5):
            claims = [found for found in threads.map(claim_at_once, storages, listed) if found]
            assert len(claims) == 1
            claims[0].release()


def test_a_released_batch_is_free_at_once_and_releasing_anothers_does_nothing(
    place: Place,
) -> None:
    first, second = place.storage(), place.storage()
    new_batch(first)
    owned = claim(first)
    owned.release()
    taken = second.claim(only_open(second))
    assert taken is not None
    owned.release()
    assert first.claim(only_open(first)) is None
    taken.renew()


def test_an_owner_whose_lease_was_taken_changes_nothing_any_more(place: Place) -> None:
    first, second = place.storage(), place.storage()
    new_batch(first)
    late = claim(first)
    old_journal = late.open_journal(JournalReader(8))
    old_journal.append(result(0, "zero"))
    taken = wait_for_lease(place, second)
    reader = JournalReader(8)
    journal = taken.open_journal(reader)
    assert reader.completed == 1
    for text in ("late", "later"):
        with pytest.raises(LeaseLostError):
            old_journal.append(result(1, text))
    with pytest.raises(LeaseLostError):
        late.save(late.record.enter(BatchState.FINALIZING, 5.0))
    with pytest.raises(LeaseLostError):
        late.finish(late.record.enter(BatchState.EXPIRED, 5.0))
    journal.append(result(1, "one"))
    assert read_results(taken) == ["zero", "one"]
    with taken.open_input() as file:
        assert file.read() == b"a\nb\n"
    shown = second.batch("acme", taken.record.id)
    assert shown is not None
    assert shown.state is BatchState.VALIDATING
    old_journal.close()
    journal.close()


def test_the_journal_is_read_by_every_later_owner(place: Place) -> None:
    storages = [place.storage() for _ in range(4)]
    new_batch(storages[0])
    for number, storage in enumerate(storages):
        claimed = claim(storage)
        reader = JournalReader(8)
        journal = claimed.open_journal(reader)
        assert reader.completed == 2 * number
        journal.append(result(2 * number, f"{2 * number}"))
        journal.append(result(2 * number + 1, f"{2 * number + 1}"))
        assert read_results(claimed) == [str(done) for done in range(2 * number + 2)]
        journal.close()
        with pytest.raises(OSError, match="closed"):
            journal.append(b"x\n")
        claimed.release()


def test_a_saved_record_is_what_the_next_owner_and_clients_see(place: Place) -> None:
    first, second = place.storage(), place.storage()
    new_batch(first)
    claimed = claim(first)
    changed = claimed.record.enter(BatchState.IN_PROGRESS, 7.0, model="m")
    claimed.save(changed)
    assert claimed.record == changed
    assert second.batch("acme", changed.id) == changed
    claimed.release()
    assert claim(second).record == changed


def test_a_batch_that_ended_just_before_it_is_claimed_is_not_claimed(place: Place) -> None:
    first, second = place.storage(), place.storage()
    new_batch(first)
    listed = only_open(second)
    owned = claim(first)
    owned.finish(owned.record.enter(BatchState.FAILED, 7.0))
    owned.release()
    assert second.claim(listed) is None
    assert second.open_batches() == []
