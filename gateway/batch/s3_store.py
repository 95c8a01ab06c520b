"""Stores files and batches in an S3 bucket, as storage_interface.py demands.

    files/TENANT/ID.json, ID.data      a file's record and content
    batches/TENANT/ID/record.json      a batch's record together with its lease
    batches/TENANT/ID/cancel           exists if cancellation was requested
    inputs/TENANT/ID                   the batch's own copy of its input file
    journals/TENANT/ID/NUMBER          entries of its journal, in the order of the numbers
    open/TIME-TENANT-ID                exists for each unfinished batch
    probe/NAME                         written at the start of a process, and deleted immediately

TENANT is a digest of the tenant's name. All gateways with the same bucket and prefix share this
data.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader
from threading import Lock
from time import monotonic
from typing import Generic, TypeVar

import msgspec

from gateway.batch.file_and_batch_objects import (
    BATCH_ID,
    FILE_ID,
    BatchRecord,
    BatchState,
    FileRecord,
    new_id,
)
from gateway.batch.s3_batch import LeasedRecord, S3Batch
from gateway.batch.s3_bucket import ConditionError, S3Bucket, StoredObject
from gateway.batch.s3_files import ObjectWriter, S3Upload, open_object, write_lines
from gateway.batch.s3_leases import LeaseWatch
from gateway.batch.storage_interface import (
    STALE_UPLOAD_S,
    LeaseLostError,
    OpenBatch,
    StorageQuota,
    Upload,
    newest_first,
    quota_exceeded,
    tenant_digest,
    too_many_files,
)

STALE_PARTS_S = 24 * 3600.0  # age from which the parts of an incomplete upload are discarded
MAX_POLL_S = 5.0
RECORDS_IN_MEMORY = 4096
OTHER_ETAG = f'"{"0" * 32}"'
READERS = 8  # maximum number of records that one call reads at the same time

T = TypeVar("T")
_OPEN = re.compile(r"open/(\d{12})-([0-9a-f]{32})-(batch_[0-9a-f]{32})")


class S3Store:
    """The files and batches below one prefix of a bucket, used by one gateway process."""

    janitor_s = 600.0

    def __init__(
        self, bucket: S3Bucket, lease_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """Create the store. A lease ends `lease_s` seconds after its last renewal, by `clock`."""
        self._bucket = bucket
        self.poll_s = min(MAX_POLL_S, lease_s / 6)
        self.owner, self._lease_s = secrets.token_hex(16), lease_s
        self._watch = LeaseWatch(clock)
        readers = ThreadPoolExecutor(READERS, thread_name_prefix="batch records")
        self._files = _RecordCache(bucket, FileRecord, readers)
        self._records = _RecordCache(bucket, LeasedRecord, readers)
        self._committing = Lock()

    def open(self) -> None:
        """Check that the bucket can be used and supports conditional writes.

        Raises OSError if it does not.
        """
        self._bucket.connect()
        key = f"probe/{self.owner}"
        self._bucket.create(key, b"", {})
        try:
            with _expected_refusal("If-None-Match"):
                self._bucket.create(key, b"", {})
            with _expected_refusal("If-Match"):
                self._bucket.replace(key, b"", OTHER_ETAG)
        finally:
            self._bucket.delete([key])

    def close(self) -> None:
        """Do nothing: the right to run batches was given back with each batch, or will expire."""

    # Files

    def start_upload(self, tenant: str, quota: StorageQuota) -> S3Upload:
        stored = self._contents(tenant)
        if len(stored) >= quota.files:
            raise too_many_files(len(stored))
        left = max(0, quota.total_bytes - sum(item.size for item in stored))
        file_id = new_id("file-")
        writer = ObjectWriter(self._bucket, _data_key(tenant, file_id), quota.file_bytes)
        return S3Upload(file_id, writer, left, quota)

    def commit_upload(self, tenant: str, upload: Upload, record: FileRecord) -> None:
        assert isinstance(upload, S3Upload)
        with self._committing:
            upload.complete()
            # Other gateways commit at the same time: each one looks after it has written.
            stored, quota = self._contents(tenant), upload.quota
            if len(stored) > quota.files or sum(item.size for item in stored) > quota.total_bytes:
                self._bucket.delete([upload.writer.key])
                if len(stored) > quota.files:
                    raise too_many_files(len(stored) - 1)
                raise quota_exceeded()
        self._bucket.write(_json_key(tenant, record.id), msgspec.json.encode(record))

    def _contents(self, tenant: str) -> list[StoredObject]:
        listed = self._bucket.objects(f"files/{tenant_digest(tenant)}/")
        return [item for item in listed if item.key.endswith(".data")]

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        if not FILE_ID.fullmatch(file_id):
            return None
        return self._files.read(_json_key(tenant, file_id))

    def files(self, tenant: str) -> list[FileRecord]:
        listed = self._bucket.objects(f"files/{tenant_digest(tenant)}/")
        found = self._files.read_all(item for item in listed if item.key.endswith(".json"))
        records = [record for _, record in found]
        newest_first(records)
        return records

    def open_content(self, tenant: str, file_id: str) -> BufferedReader:
        return open_object(self._bucket, _data_key(tenant, file_id))

    def delete_file(self, tenant: str, file_id: str) -> None:
        self._bucket.delete([_json_key(tenant, file_id)])
        self._bucket.delete([_data_key(tenant, file_id)])

    def write_result_file(
        self, tenant: str, record: FileRecord, lines: Iterator[bytes], most_bytes: int
    ) -> int:
        writer = ObjectWriter(self._bucket, _data_key(tenant, record.id), most_bytes)
        size = write_lines(writer, lines)
        if size:
            sized = msgspec.structs.replace(record, size=size)
            self._bucket.write(_json_key(tenant, record.id), msgspec.json.encode(sized))
        return size

    # Batches

    def create_batch(self, record: BatchRecord) -> None:
        source = _data_key(record.tenant, record.input_file_id)
        self._bucket.copy(source, f"inputs/{_place(record)}")
        stored = LeasedRecord(record)
        self._bucket.write(_record_key(_place(record)), msgspec.json.encode(stored))
        self._bucket.write(_open_key(record), b"")

    def _close_batch(self, record: BatchRecord) -> None:
        # Delete what only unfinished batches need. The list of unfinished ones comes last, so that
        # a process that is killed meanwhile leaves a batch that is closed again.
        place = _place(record)
        self._bucket.delete([f"inputs/{place}", f"batches/{place}/cancel"])
        self._bucket.delete(item.key for item in self._bucket.objects(f"journals/{place}/"))
        self._bucket.delete([_open_key(record)])

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        if not BATCH_ID.fullmatch(batch_id):
            return None
        stored = self._records.read(_record_key(f"{tenant_digest(tenant)}/{batch_id}"))
        if stored is None:
            return None
        record = stored.record
        return _as_shown(record, None if record.is_final else self.cancelled_at(record))

    def batches(self, tenant: str) -> list[BatchRecord]:
        listed = list(self._bucket.objects(f"batches/{tenant_digest(tenant)}/"))
        cancels = {item.key: item.modified_at for item in listed if item.key.endswith("/cancel")}
        records = [
            _as_shown(stored.record, cancels.get(f"batches/{_place(stored.record)}/cancel"))
            for _, stored in self._records.read_all(
                item for item in listed if item.key.endswith("/record.json")
            )
        ]
        newest_first(records)
        return records

    def request_cancel(self, record: BatchRecord) -> None:
        self._bucket.write(f"batches/{_place(record)}/cancel", b"")

    def cancelled_at(self, record: BatchRecord) -> float | None:
        try:
            return self._bucket.describe(f"batches/{_place(record)}/cancel")[0].modified_at
        except FileNotFoundError:
            return None

    # Ownership

    def open_batches(self) -> list[OpenBatch]:
        batches = []
        for item in self._bucket.objects("open/"):
            match = _OPEN.fullmatch(item.key)
            if match:
                batches.append(OpenBatch(int(match[1]), match[2], match[3]))
        self._watch.forget_all_but(batch.id for batch in batches)
        return batches

    def claim(self, batch: OpenBatch) -> S3Batch | None:
        if not self._watch.is_due(batch.id):
            return None
        place = f"{batch.tenant_digest}/{batch.id}"
        try:
            data, etag = self._bucket.read(_record_key(place))
        except FileNotFoundError:  # the batch has ended and was deleted
            self._bucket.delete([f"open/{batch.created_at:012}-{batch.tenant_digest}-{batch.id}"])
            return None
        stored = msgspec.json.decode(data, type=LeasedRecord)
        if stored.record.is_final:
            self._close_batch(stored.record)
            return None
        if stored.owner and not self._watch.has_expired(batch.id, etag, stored.lease_s):
            return None
        claimed = S3Batch(self._bucket, place, stored, etag, self._close_batch)
        try:
            claimed.take(self.owner, self._lease_s)
        except LeaseLostError:
            return None
        return claimed

    # Deletion

    def delete_expired(self, now: float, batch_expiry_s: float) -> None:
        self._delete_expired_files(now)
        self._delete_expired_batches(now, batch_expiry_s)
        self._bucket.abort_parts(now - STALE_PARTS_S)

    def _delete_expired_files(self, now: float) -> None:
        contents, records = {}, []
        for item in self._bucket.objects("files/"):
            if item.key.endswith(".data"):
                contents[item.key] = item
            else:
                records.append(item)
        for key, record in self._files.read_all(records):
            data_key = key.removesuffix(".json") + ".data"
            contents.pop(data_key, None)
            if record.expires_at <= now:
                self._bucket.delete([key])
                self._bucket.delete([data_key])
        self._bucket.delete(_stale(contents.values(), now))

    def _delete_expired_batches(self, now: float, batch_expiry_s: float) -> None:
        opened = {batch.id for batch in self.open_batches()}
        records = [item for item in self._bucket.objects("batches/") if "/record." in item.key]
        unfinished = {_place_in(item.key) for item in records}
        for _, stored in self._records.read_all(records):
            record, place = stored.record, _place(stored.record)
            if record.is_final:
                unfinished.discard(place)
                if max(record.state_times.values()) + batch_expiry_s <= now:
                    self._bucket.delete([_record_key(place)])
            elif record.id not in opened:  # a process was killed while it created the batch
                self._bucket.write(_open_key(record), b"")
        for prefix in ("inputs/", "journals/"):
            listed = self._bucket.objects(prefix)
            left = (item for item in listed if _place_in(item.key) not in unfinished)
            self._bucket.delete(_stale(left, now))


class _RecordCache(Generic[T]):
    # Reads records, and keeps those in memory whose entity tag in a list has not changed.

    def __init__(self, bucket: S3Bucket, kind: type[T], readers: ThreadPoolExecutor) -> None:
        self._bucket, self._kind, self._readers = bucket, kind, readers
        self._records: OrderedDict[str, tuple[str, T]] = OrderedDict()
        self._lock = Lock()

    def read(self, key: str) -> T | None:
        # Return the record, or None if it is missing or damaged.
        try:
            data, etag = self._bucket.read(key)
            record = msgspec.json.decode(data, type=self._kind)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        with self._lock:
            self._records[key] = etag, record
            self._records.move_to_end(key)
            while len(self._records) > RECORDS_IN_MEMORY:
                self._records.popitem(last=False)
        return record

    def read_all(self, listed: Iterable[StoredObject]) -> Iterator[tuple[str, T]]:
        # Yield the key and the record of each listed object that still exists.
        items = list(listed)
        for start in range(0, len(items), RECORDS_IN_MEMORY):
            some = items[start : start + RECORDS_IN_MEMORY]
            for item, record in zip(some, self._readers.map(self._read_listed, some), strict=True):
                if record is not None:
                    yield item.key, record

    def _read_listed(self, item: StoredObject) -> T | None:
        with self._lock:
            etag, record = self._records.get(item.key, ("", None))
        return record if record is not None and etag == item.etag else self.read(item.key)


@contextmanager
def _expected_refusal(header: str) -> Iterator[None]:
    # Run a conditional write that must be refused. Raises OSError if it is not.
    try:
        yield
    except ConditionError:
        return
    message = f"the storage ignores {header}, so two gateways could run the same batch"
    raise OSError(errno.EOPNOTSUPP, message)


def _as_shown(record: BatchRecord, cancelled_at: float | None) -> BatchRecord:
    if cancelled_at is None or record.is_final:
        return record
    return record.enter(BatchState.CANCELLING, cancelled_at)


def _stale(items: Iterable[StoredObject], now: float) -> Iterator[str]:
    return (item.key for item in items if now - item.modified_at > STALE_UPLOAD_S)


def _place(record: BatchRecord) -> str:
    return f"{tenant_digest(record.tenant)}/{record.id}"


def _place_in(key: str) -> str:
    # Return what _place() returns for the batch to which an object belongs.
    return "/".join(key.split("/")[1:3])


def _record_key(place: str) -> str:
    return f"batches/{place}/record.json"


def _open_key(record: BatchRecord) -> str:
    return f"open/{record.created_at:012}-{tenant_digest(record.tenant)}-{record.id}"


def _json_key(tenant: str, file_id: str) -> str:
    return f"files/{tenant_digest(tenant)}/{file_id}.json"


def _data_key(tenant: str, file_id: str) -> str:
    return f"files/{tenant_digest(tenant)}/{file_id}.data"
