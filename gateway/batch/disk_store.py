"""Stores files, batches and their journals on a local disk, as storage_interface.py demands.

    files/TENANT/ID.json, ID.data               a file's record and content
    batches/TENANT/ID/record.json, input, journal, cancel, owner
    open/ID                                     the tenant's name, for each unfinished batch
    owners/NAME                                 locked by each running gateway process
    commits                                     locked while an upload becomes a file

TENANT is a digest of the tenant's name. To replace a record, a complete new file is written, synced
and renamed to the record's name.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from time import time
from typing import IO

import msgspec

from gateway.batch.disk_batch import DiskBatch
from gateway.batch.disk_files import delete_folder, locked, read_record, replace_file
from gateway.batch.disk_ownership import BatchOwner
from gateway.batch.file_and_batch_objects import (
    BATCH_ID,
    FILE_ID,
    BatchRecord,
    BatchState,
    FileRecord,
    new_id,
)
from gateway.batch.storage_interface import (
    STALE_UPLOAD_S,
    OpenBatch,
    StorageQuota,
    Upload,
    newest_first,
    quota_exceeded,
    tenant_digest,
    too_many_files,
)


class DiskUpload:
    """A file that is being received. commit_upload() makes it visible; close() discards it."""

    def __init__(self, path: Path, most_bytes: int, quota: StorageQuota) -> None:
        self._most_bytes = most_bytes
        self.quota = quota
        self.path = path
        self.id = new_id("file-")
        self.size = 0
        self._lock = threading.Lock()
        self._file: IO[bytes] = path.open("xb")

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > self._most_bytes:
            raise quota_exceeded()
        with self._lock:
            self._file.write(data)

    def sync(self) -> None:
        with self._lock:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def close(self) -> None:
        with self._lock:
            self._file.close()
            self.path.unlink(missing_ok=True)


class DiskStore:
    """The storage of files and batches in a folder of a local disk. It implements BatchStorage.

    All gateway processes of a machine may use the same folder.
    """

    poll_s = 1.0
    janitor_s = 60.0

    def __init__(self, folder: Path, lease_s: float, clock: Callable[[], float] = time) -> None:
        """Create the store. A lease ends `lease_s` seconds after its last renewal, by `clock`."""
        self.folder = folder
        self._owner = BatchOwner(folder / "owners", lease_s)
        self._clock = clock

    def open(self) -> None:
        for name in ("files", "batches", "open", "owners"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner.open()

    def close(self) -> None:
        self._owner.close()

    # Files

    def start_upload(self, tenant: str, quota: StorageQuota) -> DiskUpload:
        folder = self._files(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        sizes = _sizes(folder, (".data", ".part"))
        if len(sizes) >= quota.files:
            raise too_many_files(len(sizes))
        path = folder / f"{secrets.token_hex(16)}.part"
        return DiskUpload(path, max(0, quota.total_bytes - sum(sizes)), quota)

    def commit_upload(self, tenant: str, upload: Upload, record: FileRecord) -> None:
        assert isinstance(upload, DiskUpload)
        upload.sync()
        folder = self._files(tenant)
        with locked(self.folder / "commits"):
            stored = _sizes(folder, (".data",))
            if len(stored) >= upload.quota.files:
                raise too_many_files(len(stored))
            if sum(stored) + upload.size > upload.quota.total_bytes:
                raise quota_exceeded()
            upload.path.rename(folder / f"{record.id}.data")
        replace_file(folder / f"{record.id}.json", msgspec.json.encode(record))

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        if not FILE_ID.fullmatch(file_id):
            return None
        return read_record(self._files(tenant) / f"{file_id}.json", FileRecord)

    def files(self, tenant: str) -> list[FileRecord]:
        paths = self._files(tenant).glob("file-*.json")
        records = [r for path in paths if (r := read_record(path, FileRecord)) is not None]
        newest_first(records)
        return records

    def open_content(self, tenant: str, file_id: str) -> BufferedReader:
        return self.content(tenant, file_id).open("rb")

    def content(self, tenant: str, file_id: str) -> Path:
        return self._files(tenant) / f"{file_id}.data"

    def delete_file(self, tenant: str, file_id: str) -> None:
        for suffix in (".json", ".data"):
            (self._files(tenant) / f"{file_id}{suffix}").unlink(missing_ok=True)

    def write_result_file(
        self, tenant: str, record: FileRecord, lines: Iterator[bytes], most_bytes: int
    ) -> int:
        folder = self._files(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{secrets.token_hex(16)}.part"
        with path.open("xb") as file:
            for line in lines:
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if not size:
            path.unlink()
            return 0
        path.rename(folder / f"{record.id}.data")
        sized = msgspec.structs.replace(record, size=size)
        replace_file(folder / f"{record.id}.json", msgspec.json.encode(sized))
        return size

    # Batches

    def create_batch(self, record: BatchRecord) -> None:
        folder = self.batch_folder(record.tenant, record.id)
        folder.mkdir(mode=0o700, parents=True)
        os.link(self.content(record.tenant, record.input_file_id), folder / "input")
        replace_file(folder / "record.json", msgspec.json.encode(record))
        self._open_batch(record)

    def _open_batch(self, record: BatchRecord) -> None:
        replace_file(self.folder / "open" / record.id, record.tenant.encode())

    def _close_batch(self, record: BatchRecord) -> None:
        # Delete what only unfinished batches need. The list of unfinished ones comes last, so that
        # a process that is killed meanwhile leaves a batch that is closed again.
        folder = self.batch_folder(record.tenant, record.id)
        for name in ("input", "journal", "cancel"):
            (folder / name).unlink(missing_ok=True)
        (self.folder / "open" / record.id).unlink(missing_ok=True)

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        if not BATCH_ID.fullmatch(batch_id):
            return None
        record = self._record(self.batch_folder(tenant, batch_id))
        return None if record is None else self._as_shown(record)

    def batches(self, tenant: str) -> list[BatchRecord]:
        folders = (self.folder / "batches" / tenant_digest(tenant)).glob("batch_*")
        records = [self._as_shown(r) for path in folders if (r := self._record(path)) is not None]
        newest_first(records)
        return records

    def _record(self, folder: Path) -> BatchRecord | None:
        return read_record(folder / "record.json", BatchRecord)

    def _as_shown(self, record: BatchRecord) -> BatchRecord:
        at = None if record.is_final else self.cancelled_at(record)
        return record if at is None else record.enter(BatchState.CANCELLING, at)

    def request_cancel(self, record: BatchRecord) -> None:
        replace_file(self.batch_folder(record.tenant, record.id) / "cancel", b"")

    def cancelled_at(self, record: BatchRecord) -> float | None:
        try:
            return (self.batch_folder(record.tenant, record.id) / "cancel").stat().st_mtime
        except OSError:
            return None

    def batch_folder(self, tenant: str, batch_id: str) -> Path:
        return self._folder_of(tenant_digest(tenant), batch_id)

    def _folder_of(self, digest: str, batch_id: str) -> Path:
        return self.folder / "batches" / digest / batch_id

    # Ownership

    def open_batches(self) -> list[OpenBatch]:
        batches = []
        for path in (self.folder / "open").iterdir():
            if BATCH_ID.fullmatch(path.name):
                with suppress(OSError):
                    digest = tenant_digest(path.read_text())
                    record = self._record(self._folder_of(digest, path.name))
                    if record is not None:
                        batches.append(OpenBatch(record.created_at, digest, record.id))
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id))

    def claim(self, batch: OpenBatch) -> DiskBatch | None:
        folder = self._folder_of(batch.tenant_digest, batch.id)
        if not self._owner.claim(folder, self._clock()):
            return None
        # The record is read under the lease: another process may have changed it before.
        record = self._record(folder)
        if record is None:
            return None
        if record.is_final:
            self._close_batch(record)
            return None
        return DiskBatch(folder, record, self._owner, self._clock, self._close_batch)

    # Deletion

    def delete_expired(self, now: float, batch_expiry_s: float) -> None:
        self._delete_expired_files(now)
        for folder in (self.folder / "batches").glob("*/batch_*"):
            batch = self._record(folder)
            if batch is None:
                with suppress(OSError):
                    is_old = now - folder.stat().st_mtime > STALE_UPLOAD_S
                    if is_old and not (folder / "record.json").exists():
                        delete_folder(folder)
            elif batch.is_final:
                if max(batch.state_times.values()) + batch_expiry_s <= now:
                    delete_folder(folder)
            elif not (self.folder / "open" / batch.id).exists():
                # A process was killed while it created the batch.
                self._open_batch(batch)

    def _delete_expired_files(self, now: float) -> None:
        for path in (self.folder / "files").glob("*/*"):
            if path.suffix == ".json":
                record = read_record(path, FileRecord)
                if record is not None and record.expires_at <= now:
                    path.unlink(missing_ok=True)
                    path.with_suffix(".data").unlink(missing_ok=True)
            elif path.suffix == ".part" or not path.with_suffix(".json").exists():
                with suppress(OSError):
                    if now - path.stat().st_mtime > STALE_UPLOAD_S:
                        path.unlink()

    def _files(self, tenant: str) -> Path:
        return self.folder / "files" / tenant_digest(tenant)


def _sizes(folder: Path, suffixes: tuple[str, ...]) -> list[int]:
    # Return the sizes in bytes of a folder's files with these suffixes. Another upload or a client
    # may delete a file between its listing and the look at its size.
    sizes = []
    for entry in os.scandir(folder):
        if entry.name.endswith(suffixes):
            with suppress(FileNotFoundError):
                sizes.append(entry.stat().st_size)
    return sizes
