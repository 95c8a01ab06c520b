"""Tests that batches in S3 survive lost responses, refused requests, and killed processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.batch.file_and_batch_objects import BatchRecord, BatchState, FileRecord, new_id
from gateway.batch.result_journal import JournalEntry, JournalReader, encode_entry
from gateway.batch.s3_bucket import S3Bucket
from gateway.batch.s3_store import S3Store
from gateway.batch.storage_interface import (
    STALE_UPLOAD_S,
    LeaseLostError,
    StorageQuota,
    StorageUnreachableError,
)
from gateway.config import BatchS3
from tests.s3_server import BUCKET, KEYS, S3Server, s3_server

pytest.importorskip("botocore", reason="the extra `s3` is not installed")
pytest.importorskip("moto", reason="moto is not installed")

LEASE_S = 30.0
MIB = 1024 * 1024
QUOTA = StorageQuota(10, 200 * MIB, 200 * MIB)


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    running.reset()
    monkeypatch.setattr("gateway.batch.s3_bucket.MAX_ATTEMPTS", 2)
    return running


def section(server: S3Server, **changes: Any) -> BatchS3:
    values: dict[str, Any] = {"bucket": BUCKET, "endpoint_url": server.url, "region": "us-east-1"}
    keys = {"access_key_id": "test-id", "secret_access_key": "test-secret"}
    return BatchS3(**values | keys | changes)


def opened(server: S3Server, clock: Callable[[], float] = time.monotonic) -> S3Store:
    store = S3Store(S3Bucket(section(server)), LEASE_S, clock)
    store.open()
    return store


def put(store: S3Store, data: bytes) -> FileRecord:
    upload = store.start_upload("acme", QUOTA)
    upload.write(data)
    record = FileRecord(upload.id, "a", "batch", upload.size, 0, 2**40)
    store.commit_upload("acme", upload, record)
    return record


def new_batch(store: S3Store) -> BatchRecord:
    batch_id, now = new_id("batch_"), int(time.time())
    file = put(store, b"a\nb\n")
    record = BatchRecord(batch_id, "acme", "", "/v1/embeddings", file.id, "24h", now, now + 60)
    store.create_batch(record)
    return record


def once(text: str, fault: str) -> Callable[[str], str | None]:
    # Return a fault for the first request that contains this text.
    left = [fault]
    return lambda request: left.pop() if text in request and left else None


def result(number: int, text: str) -> bytes:
    return encode_entry(JournalEntry(number, True, text))


def parts_in_progress(store: S3Store) -> list[Any]:
    answer = store._bucket._client.list_multipart_uploads(Bucket=BUCKET)
    return list(answer.get("Uploads", []))


def test_a_write_whose_answer_was_lost_is_recognised_and_counts_once(server: S3Server) -> None:
    store = opened(server)
    new_batch(store)
    server.fault = once("PUT /penstock-test/penstock/batches/", "lose")
    claimed = store.claim(store.open_batches()[0])
    assert claimed is not None
    reader = JournalReader(4)
    server.fault = once("PUT /penstock-test/penstock/journals/", "lose")
    journal = claimed.open_journal(reader)
    for number in range(3):
        server.fault = once("PUT /penstock-test/penstock/journals/", "lose")
        journal.append(result(number, str(number)))
        server.fault = once("PUT /penstock-test/penstock/batches/", "lose")
        claimed.save(claimed.record.enter(BatchState.IN_PROGRESS, number))
    found = [reader.feed(line) for line in claimed.journal_lines()]
    assert [entry.result for entry in found if entry is not None] == ["0", "1", "2"]
    lines = list(claimed.journal_lines())
    assert len([line for line in lines if b"result" in line]) == 3
    claimed.release()
    journal.close()


def test_an_append_may_be_repeated_with_more_entries_after_it_failed(server: S3Server) -> None:
    store = opened(server)
    new_batch(store)
    claimed = store.claim(store.open_batches()[0])
    assert claimed is not None
    journal = claimed.open_journal(JournalReader(4))
    lost = [2]

    def lose_both_attempts(request: str) -> str | None:
        if "/journals/" in request and lost[0]:
            lost[0] -= 1
            return "lose" if lost[0] else "refuse"
        return None

    server.fault = lose_both_attempts
    with pytest.raises(StorageUnreachableError):
        journal.append(result(0, "zero"))
    journal.append(result(0, "zero") + result(1, "one"))
    reader = JournalReader(4)
    entries = [reader.feed(line) for line in claimed.journal_lines()]
    assert [entry.result for entry in entries if entry is not None] == ["zero", "one"]
    journal.close()


def test_a_process_that_read_the_lease_before_another_took_it_is_refused(
    server: S3Server,
) -> None:
    stores = [opened(server), opened(server)]
    new_batch(stores[0])
    batch = stores[0].open_batches()[0]
    read = stores[1]._bucket.read

    def read_then_let_the_other_claim(key: str) -> tuple[bytes, str]:
        found = read(key)
        if len(claimed) < 1:
            claimed.append(stores[0].claim(batch))
        return found

    claimed: list[Any] = []
    stores[1]._bucket.read = read_then_let_the_other_claim  # type: ignore[method-assign]
    assert stores[1].claim(batch) is None
    assert claimed[0] is not None
    claimed[0].renew()


def test_an_owner_that_is_slow_to_open_the_journal_does_not_stop_its_successor(
    server: S3Server,
) -> None:
    now = [0.0]
    stores = [opened(server, lambda: now[0]) for _ in range(2)]
    new_batch(stores[0])
    batch = stores[0].open_batches()[0]
    slow = stores[0].claim(batch)
    assert slow is not None
    assert stores[1].claim(batch) is None
    now[0] += LEASE_S
    taken = stores[1].claim(batch)
    assert taken is not None
    with pytest.raises(LeaseLostError):
        slow.open_journal(JournalReader(4))
    journal = taken.open_journal(JournalReader(4))
    journal.append(result(0, "zero"))
    journal.close()


def test_a_lease_is_looked_at_a_few_times_and_not_in_every_round(server: S3Server) -> None:
    now = [0.0]
    stores = [opened(server, lambda: now[0]) for _ in range(2)]
    new_batch(stores[0])
    batch = stores[0].open_batches()[0]
    owned = stores[0].claim(batch)
    assert owned is not None
    server.log.clear()
    for _ in range(int(2 * LEASE_S)):
        assert stores[1].claim(batch) is None
        if now[0] % (LEASE_S / 3) == 0:
            owned.renew()
        now[0] += 1.0
    looks = [line for line in server.log if line.startswith("GET") and "record.json" in line]
    assert 4 <= len(looks) <= 8


def test_records_are_read_again_only_when_they_have_changed(server: S3Server) -> None:
    first, second = opened(server), opened(server)
    records = {put(first, b"x").id for _ in range(5)}
    for _ in range(3):
        assert {record.id for record in second.files("acme")} == records
    assert sum("GET" in line and ".json" in line for line in server.log) == 5


def test_a_storage_that_ignores_conditions_is_refused(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = server._app

    def without(header: str) -> Any:
        def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            environ.pop(header, None)
            return app(environ, start)

        return serve

    for header, name in (("HTTP_IF_NONE_MATCH", "If-None-Match"), ("HTTP_IF_MATCH", "If-Match")):
        monkeypatch.setattr(server, "_app", without(header))
        with pytest.raises(OSError, match=f"ignores {name},"):
            opened(server)


def test_failures_are_named_without_credentials(server: S3Server, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, "penstock")
    with pytest.raises(OSError, match="NoSuchBucket") as missing:
        S3Store(S3Bucket(section(server, bucket="other-bucket")), LEASE_S).open()
    server.fault = lambda _: "forbid"
    with pytest.raises(OSError, match="status 403") as forbidden:
        opened(server)
    server.fault = lambda _: "refuse"
    with pytest.raises(StorageUnreachableError, match="status 500"):
        opened(server)
    gone = section(server, endpoint_url="http://127.0.0.1:1")
    with pytest.raises(StorageUnreachableError, match="EndpointConnectionError") as closed:
        S3Store(S3Bucket(gone), LEASE_S).open()
    texts = [str(error.value) for error in (missing, forbidden, closed)] + [caplog.text]
    for secret in KEYS.values():
        assert not any(secret in text for text in texts)
    assert not any(secret in repr(section(server)) for secret in KEYS.values())


def test_a_large_file_passes_through_a_few_mebibytes_of_memory(server: S3Server) -> None:
    store = opened(server)
    piece = b"x" * (256 * 1024)
    upload = store.start_upload("acme", QUOTA)
    # The server is in the same process, so only what the writer itself holds is measured.
    most = 0
    for _ in range(80):
        upload.write(piece)
        most = max(most, len(upload.writer._pending))
    assert most <= 6 * MIB
    record = FileRecord(upload.id, "a", "batch", upload.size, 0, 2**40)
    store.commit_upload("acme", upload, record)
    parts = [line for line in server.log if "partNumber=" in line]
    assert len(parts) == 4
    with store.open_content("acme", record.id) as file:
        assert len(file.read(256 * 1024)) == 256 * 1024
        file.seek(20 * MIB - 7)
        assert file.read(256 * 1024) == b"x" * 7
    spans = [line.partition(" bytes=")[2].split("-") for line in server.log if " bytes=" in line]
    assert [int(last) - int(first) + 1 for first, last in spans] == [MIB, 7]


def test_objects_are_deleted_one_by_one_where_many_at_once_are_refused(server: S3Server) -> None:
    store = opened(server)
    new_batch(store)
    claimed = store.claim(store.open_batches()[0])
    assert claimed is not None
    journal = claimed.open_journal(JournalReader(4))
    for number in range(4):
        journal.append(result(number, "x"))
    server.fault = lambda request: "forbid" if "?delete" in request else None
    claimed.finish(claimed.record.enter(BatchState.COMPLETED, 1.0))
    assert list(store._bucket.objects("journals/")) == []
    assert list(store._bucket.objects("inputs/")) == []


def test_what_killed_processes_left_behind_is_deleted_in_time(server: S3Server) -> None:
    store = opened(server)
    record = new_batch(store)
    bucket, now = store._bucket, time.time()
    left = [f"files/x/{new_id('file-')}.data", f"inputs/x/{new_id('batch_')}"]
    left.append(f"journals/x/{new_id('batch_')}/0000000001")
    for key in left:
        bucket.write(key, b"x")
    upload = store.start_upload("acme", QUOTA)
    upload.write(b"x" * 6 * MIB)
    # The test server reports 2010 as the start of every upload in parts.
    bucket.abort_parts(1.0)
    assert len(parts_in_progress(store)) == 1
    store.delete_expired(now, 10.0)
    assert parts_in_progress(store) == []
    assert {item.key for item in bucket.objects("")} > set(left)
    store.delete_expired(now + STALE_UPLOAD_S + 60, 10.0)
    assert not {item.key for item in bucket.objects("")} & set(left)
    assert [batch.id for batch in store.open_batches()] == [record.id]


def test_a_batch_whose_creator_was_killed_before_it_was_listed_runs(server: S3Server) -> None:
    store = opened(server)
    record = new_batch(store)
    bucket = store._bucket
    bucket.delete([item.key for item in bucket.objects("open/")])
    assert store.open_batches() == []
    store.delete_expired(time.time(), 10.0)
    assert [batch.id for batch in store.open_batches()] == [record.id]
    assert store.claim(store.open_batches()[0]) is not None


def test_prefixes_of_one_bucket_are_apart(server: S3Server) -> None:
    one = S3Store(S3Bucket(section(server, prefix="one")), LEASE_S)
    two = S3Store(S3Bucket(section(server, prefix="one/two")), LEASE_S)
    for store in (one, two):
        store.open()
    put(one, b"x")
    assert two.files("acme") == []
    assert len(one.files("acme")) == 1


def test_large_input_files_are_copied_in_parts(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server)
    data = bytes(range(256)) * 4096 * 6
    file = put(store, data)
    monkeypatch.setattr("gateway.batch.s3_bucket.MAX_COPY_BYTES", MIB)
    monkeypatch.setattr("gateway.batch.s3_bucket.COPY_PART_BYTES", 5 * MIB)
    record = BatchRecord(new_id("batch_"), "acme", "", "/v1/embeddings", file.id, "24h", 0, 60)
    store.create_batch(record)
    claimed = store.claim(store.open_batches()[0])
    assert claimed is not None
    with claimed.open_input() as copied:
        assert copied.read() == data
