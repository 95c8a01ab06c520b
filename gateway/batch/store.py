"""Stores files, batches of requests and their journals on a local disk.

All calls block; use them in threads.

    files/TENANT/ID.json, ID.data               a file's record and content
    batches/TENANT/ID/record.json, input, journal, cancel, owner
    open/ID                                     the tenant's name, for each unfinished batch
    owners/NAME                                 locked by each running gateway process

TENANT is a digest of the tenant's name. A record is replaced by renaming a complete new file over
it, which was synced before.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from gateway.batch.records import BATCH_ID, FILE_ID, BatchRecord, FileRecord

COPY_BYTES = 1 << 20
STALE_UPLOAD_S = 3600.0  # age from which an incomplete upload is left over from a killed process

T = TypeVar("T")


class StorageFullError(Exception):
    """Raised when a file would exceed a quota of its tenant; the message names the quota."""


class Upload:
    """A file that is being received: commit_upload() makes it visible, close() discards it.

    quota_bytes  the bytes that all files of the tenant may have together
    """

    def __init__(self, path: Path, most_bytes: int, quota_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.quota_bytes = quota_bytes
        self.path = path
        self.size = 0
        self._file: IO[bytes] = path.open("xb")

    def write(self, data: bytes) -> None:
        """Append bytes to the uploaded file.

        Raises StorageFullError when the tenant's quota is exceeded.
        """
        self.size += len(data)
        if self.size > self._most_bytes:
            raise _quota_exceeded()
        self._file.write(data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Discard an uploaded file, unless the upload was committed."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class BatchStore:
    """The folder that holds all files and batches of a gateway, or of several on one machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._committing = threading.Lock()

    def create(self) -> None:
        """Create the folders of the store of files and batches. Raises OSError."""
        for name in ("files", "batches", "open", "owners"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    # Files

    def start_upload(self, tenant: str, max_files: int, max_bytes: int) -> Upload:
        """Start to receive a file of a tenant, within the tenant's quota of files and bytes.

        Raises StorageFullError when the quota is used up.
        """
        folder = self._files(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        sizes = [entry.stat().st_size for entry in os.scandir(folder) if not _is_record(entry.name)]
        if len(sizes) >= max_files:
            raise StorageFullError(f"The tenant has {len(sizes)} files, the most it may have.")
        path = folder / f"{secrets.token_hex(16)}.part"
        return Upload(path, max(0, max_bytes - sum(sizes)), max_bytes)

    def commit_upload(self, tenant: str, upload: Upload, record: FileRecord) -> None:
        """Make an uploaded file visible under its record's id.

        Raises StorageFullError if other uploads have used up the tenant's quota meanwhile.
        """
        upload.sync()
        folder = self._files(tenant)
        with self._committing:
            stored = sum(entry.stat().st_size for entry in os.scandir(folder) if _is_content(entry))
            if stored + upload.size > upload.quota_bytes:
                raise _quota_exceeded()
            upload.path.rename(folder / f"{record.id}.data")
        _replace(folder / f"{record.id}.json", msgspec.json.encode(record))

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return the record of a tenant's file, or None if the tenant has no such file."""
        if not FILE_ID.fullmatch(file_id):
            return None
        return _read(self._files(tenant) / f"{file_id}.json", FileRecord)

    def files(self, tenant: str) -> list[FileRecord]:
        paths = self._files(tenant).glob("file-*.json")
        records = [record for path in paths if (record := _read(path, FileRecord)) is not None]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def content(self, tenant: str, file_id: str) -> Path:
        return self._files(tenant) / f"{file_id}.data"

    def delete_file(self, tenant: str, file_id: str) -> None:
        for suffix in (".json", ".data"):
            (self._files(tenant) / f"{file_id}{suffix}").unlink(missing_ok=True)

    def write_result_file(self, tenant: str, record: FileRecord, lines: Iterator[bytes]) -> int:
        """Write a batch's file of results, and return its size in bytes.

        Without any line, nothing is written. Writing the file again replaces it.
        """
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
        _replace(folder / f"{record.id}.json", msgspec.json.encode(sized))
        return size

    # Batches

    def create_batch(self, record: BatchRecord) -> None:
        """Store a new batch, with its own link to the input file's content. Raises OSError."""
        folder = self.batch_folder(record.tenant, record.id)
        folder.mkdir(mode=0o700, parents=True)
        os.link(self.content(record.tenant, record.input_file_id), folder / "input")
        self.save_batch(record)
        self._open_batch(record)

    def _open_batch(self, record: BatchRecord) -> None:
        _replace(self.folder / "open" / record.id, record.tenant.encode())

    def close_batch(self, record: BatchRecord) -> None:
        """Remove an ended batch from the unfinished ones, and delete its files that only unfinished
        batches need.
        """
        folder = self.batch_folder(record.tenant, record.id)
        (self.folder / "open" / record.id).unlink(missing_ok=True)
        for name in ("input", "journal", "cancel"):
            (folder / name).unlink(missing_ok=True)

    def open_batches(self) -> list[BatchRecord]:
        """Return the unfinished batches of all tenants, oldest first."""
        records = []
        for path in (self.folder / "open").iterdir():
            if BATCH_ID.fullmatch(path.name):
                with suppress(OSError):
                    record = self.batch(path.read_text(), path.name)
                    if record is not None:
                        records.append(record)
        return sorted(records, key=lambda record: (record.created_at, record.id))

    def save_batch(self, record: BatchRecord) -> None:
        path = self.batch_folder(record.tenant, record.id) / "record.json"
        _replace(path, msgspec.json.encode(record))

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return the record of a tenant's batch, or None if the tenant has no such batch."""
        if not BATCH_ID.fullmatch(batch_id):
            return None
        return _read(self.batch_folder(tenant, batch_id) / "record.json", BatchRecord)

    def batches(self, tenant: str) -> list[BatchRecord]:
        paths = (self.folder / "batches" / _digest(tenant)).glob("batch_*/record.json")
        records = [record for path in paths if (record := _read(path, BatchRecord)) is not None]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def all_batches(self) -> list[BatchRecord]:
        paths = (self.folder / "batches").glob("*/batch_*/record.json")
        records = [record for path in paths if (record := _read(path, BatchRecord)) is not None]
        return sorted(records, key=lambda record: (record.created_at, record.id))

    def request_cancel(self, record: BatchRecord) -> None:
        """Request that the owner of a batch cancel it; the request is stored on disk."""
        _replace(self.batch_folder(record.tenant, record.id) / "cancel", b"")

    def cancelled_at(self, record: BatchRecord) -> float | None:
        """Return when the cancellation of a batch was requested (Unix seconds), or None if it was
        not.
        """
        try:
            return (self.batch_folder(record.tenant, record.id) / "cancel").stat().st_mtime
        except OSError:
            return None

    def batch_folder(self, tenant: str, batch_id: str) -> Path:
        return self.folder / "batches" / _digest(tenant) / batch_id

    # Deletion

    def delete_expired(self, now: float, batch_expiry_s: float) -> None:
        """Delete expired files, batches that ended long ago, and the leftovers of killed processes.

        A batch that a killed process has created only in part is added to the unfinished ones.
        `now` is in Unix seconds; finished batches are deleted after `batch_expiry_s` seconds.
        """
        for path in (self.folder / "files").glob("*/*"):
            if path.suffix == ".json":
                record = _read(path, FileRecord)
                if record is not None and record.expires_at <= now:
                    path.unlink(missing_ok=True)
                    path.with_suffix(".data").unlink(missing_ok=True)
            elif path.suffix == ".part" or not path.with_suffix(".json").exists():
                with suppress(OSError):
                    if now - path.stat().st_mtime > STALE_UPLOAD_S:
                        path.unlink()
        for batch in self.all_batches():
            if batch.is_final:
                if max(batch.state_times.values()) + batch_expiry_s <= now:
                    _delete_folder(self.batch_folder(batch.tenant, batch.id))
            elif not (self.folder / "open" / batch.id).exists():
                # A process was killed while it created the batch.
                self._open_batch(batch)
        for folder in (self.folder / "batches").glob("*/batch_*"):
            with suppress(OSError):
                is_old = now - folder.stat().st_mtime > STALE_UPLOAD_S
                if is_old and not (folder / "record.json").exists():
                    _delete_folder(folder)

    def _files(self, tenant: str) -> Path:
        return self.folder / "files" / _digest(tenant)


class JournalFile:
    """The journal of one batch, open for appending by its owner."""

    def __init__(self, path: Path, size: int) -> None:
        # Open the journal, and cut off everything after its first `size` bytes.
        self._lock = threading.Lock()
        self._is_open = True
        self._is_damaged = False  # a write has failed, perhaps in the middle of an entry
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        _sync_folder(path.parent)

    def append(self, data: bytes) -> None:
        """Append entries to a batch's journal and sync them to disk.

        Raises OSError; the call may then be repeated.
        """
        with self._lock:
            if not self._is_open:
                raise OSError("the journal is closed")
            # The next entry must not continue the line of an entry that was written in part.
            view = memoryview(b"\n" + data if self._is_damaged else data)
            self._is_damaged = True
            while view:
                view = view[os.write(self._fd, view) :]
            os.fdatasync(self._fd)
            self._is_damaged = False

    def close(self) -> None:
        """Close the journal of a batch, once an append() in another thread has ended."""
        with self._lock:
            self._is_open = False
            os.close(self._fd)


def read_line(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _digest(tenant: str) -> str:
    return hashlib.sha256(b"tenant:" + tenant.encode()).hexdigest()[:32]


def _quota_exceeded() -> StorageFullError:
    return StorageFullError("The tenant's files would exceed its storage quota.")


def _is_content(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".data")


def _is_record(name: str) -> bool:
    return name.endswith(".json")


def _replace(path: Path, data: bytes) -> None:
    # Replace a file's content so that a crash leaves either the old or the new content.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    with part.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, kind: type[T]) -> T | None:
    # Read a stored record of type `kind`; return None if it is missing or damaged.
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _delete_folder(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """Hold an exclusive lock on a file during a `with` block.

    The file is created if it is missing.
    """
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
