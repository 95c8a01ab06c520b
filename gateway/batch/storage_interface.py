"""The interface of the storage of files and batches. A local disk and S3 implement it.

All calls block; use them in threads. They raise OSError if the storage fails. Tenants are isolated:
a call for one tenant never finds the files or batches of another.

A lease on a batch is the exclusive right of one process to run it. It ends unless it is renewed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from io import BufferedReader
from typing import Protocol

import msgspec

from gateway.batch.file_and_batch_objects import BatchRecord, FileRecord
from gateway.batch.result_journal import JournalReader

STALE_UPLOAD_S = 3600.0  # age from which an incomplete upload is left over from a killed process


class StorageFullError(Exception):
    """Raised if a file would exceed a storage quota of its tenant; the message names the quota."""


class StorageUnreachableError(OSError):
    """Raised if the storage cannot be reached or does not work now; it may work later."""


class LeaseLostError(OSError):
    """Raised if this process wants to change a batch whose lease another process has taken."""


class StorageQuota(msgspec.Struct, frozen=True):
    """The limits of one tenant's files: their number, their total bytes, and bytes of one file."""

    files: int
    total_bytes: int
    file_bytes: int


class OpenBatch(msgspec.Struct, frozen=True):
    """Identifies an unfinished batch by its id and the digest of its tenant's name."""

    created_at: int
    tenant_digest: str
    id: str


class Upload(Protocol):
    """A file that is being received. The storage's commit_upload() makes it visible.

    id    the id that the file will have
    size  number of bytes received so far
    """

    id: str
    size: int

    def write(self, data: bytes) -> None:
        """Append bytes to the file.

        Raises StorageFullError if the tenant's quota is exceeded.
        """

    def close(self) -> None:
        """Discard the upload unless it was committed. Waits for a write in another thread."""


class BatchJournal(Protocol):
    """The interface of a batch's journal, to which the results of its requests are appended.

    Only the process with the batch's lease (the right to run it) may open the journal.

    pause_s  seconds for which to collect entries before the next append(), because each append()
             has a fixed cost
    """

    @property
    def pause_s(self) -> float: ...

    def append(self, data: bytes) -> None:
        """Append complete entries to the journal. They are stored durably when the call returns.

        Raises OSError if the storage fails; the call may then be repeated, with more entries.
        Raises LeaseLostError, and stores nothing, if another process has taken over the batch.
        """

    def close(self) -> None:
        """Close the journal. Waits until an append() in another thread has ended."""


class ClaimedBatch(Protocol):
    """The interface to the stored data of a batch that this process runs, because it has the lease.

    If another process has taken the lease since, methods that change data raise LeaseLostError and
    change nothing.

    record  the batch as it was last stored
    """

    @property
    def record(self) -> BatchRecord: ...

    def renew(self) -> None:
        """Renew the lease that lets this process run the batch."""

    def save(self, record: BatchRecord) -> None:
        """Store the record of the batch, which this process has changed."""

    def finish(self, record: BatchRecord) -> None:
        """Store the record of an ended batch, and delete data that only a running batch needs."""

    def release(self) -> None:
        """Release this process's lease on the batch, so that another process may take it."""

    def open_input(self) -> BufferedReader:
        """Open the batch's own copy of its input file. It outlives the uploaded file."""

    def read_input(self, offset: int, size: int) -> bytes: ...

    def open_journal(self, reader: JournalReader) -> BatchJournal:
        """Read the whole journal into `reader`, and open the journal for appending.

        Afterwards, no earlier owner of the batch can append to it.
        """

    def journal_lines(self) -> Iterator[bytes]:
        """Yield the lines of the journal, which this process must have opened for appending."""


class BatchStorage(Protocol):
    """The interface of the storage in which the Batch API keeps files and batches.

    Each gateway process has one object. Several processes may use the same storage.

    poll_s     seconds between two checks for changes by other processes
    janitor_s  seconds between two calls of delete_expired()
    """

    poll_s: float
    janitor_s: float

    def open(self) -> None:
        """Prepare the storage for this process. Call this before any other method."""

    def close(self) -> None:
        """Release what open() has taken. Other processes may then take over this one's batches."""

    # Files

    def start_upload(self, tenant: str, quota: StorageQuota) -> Upload:
        """Start to receive a file of a tenant.

        Raises StorageFullError if the tenant's quota is used up.
        """

    def commit_upload(self, tenant: str, upload: Upload, record: FileRecord) -> None:
        """Make an uploaded file visible to its tenant. Its record must have the upload's id.

        Raises StorageFullError if other uploads have used up the tenant's quota in the meantime.
        """

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return the record of a tenant's file; None if the tenant has no such file."""

    def files(self, tenant: str) -> list[FileRecord]:
        """Return the records of a tenant's uploaded files, newest first."""

    def open_content(self, tenant: str, file_id: str) -> BufferedReader:
        """Open the content of a tenant's file. Raises FileNotFoundError if there is none."""

    def delete_file(self, tenant: str, file_id: str) -> None: ...

    def write_result_file(
        self, tenant: str, record: FileRecord, lines: Iterator[bytes], most_bytes: int
    ) -> int:
        """Write a file of results, and return its size in bytes. Without lines, nothing is written.

        tenant      owner of the file
        record      the file's record
        lines       the lines of the file
        most_bytes  approximate upper limit of the file's size
        """

    # Batches

    def create_batch(self, record: BatchRecord) -> None:
        """Store a new batch, with its own copy of the input file."""

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a tenant's batch as clients see it; None if the tenant has no such batch.

        Its state is CANCELLING if cancellation was requested.
        """

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Return a tenant's batches as clients see them, newest first."""

    def request_cancel(self, record: BatchRecord) -> None:
        """Store a request to cancel the batch, which its owner will carry out."""

    def cancelled_at(self, record: BatchRecord) -> float | None:
        """Return the Unix time at which a cancellation was requested; None if none was."""

    def open_batches(self) -> list[OpenBatch]:
        """Return the records of all tenants' unfinished batches, oldest first."""

    def claim(self, batch: OpenBatch) -> ClaimedBatch | None:
        """Take the right to run a batch (its lease); return None if another process has it."""

    def delete_expired(self, now: float, batch_expiry_s: float) -> None:
        """Delete expired files, batches that ended long ago, and what killed processes have left.

        A batch whose process was killed while creating it is added to the unfinished batches.

        now             Unix time in seconds
        batch_expiry_s  seconds after which finished batches are deleted
        """


def tenant_digest(tenant: str) -> str:
    """Return the name under which the storage keeps a tenant's data."""
    return hashlib.sha256(b"tenant:" + tenant.encode()).hexdigest()[:32]


def quota_exceeded() -> StorageFullError:
    return StorageFullError("The tenant's files would exceed its storage quota.")


def too_many_files(count: int) -> StorageFullError:
    return StorageFullError(f"The tenant has {count} files, the most it may have.")


def newest_first(records: list[FileRecord] | list[BatchRecord]) -> None:
    records.sort(key=lambda record: (record.created_at, record.id), reverse=True)
