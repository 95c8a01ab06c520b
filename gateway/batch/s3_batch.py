"""A batch in S3 that this process owns (has leased), and the journal of its results.

The record and the lease are one object. Each change of it requires the entity tag of the previous
change. The journal is a sequence of numbered objects, each of which is written only if it does not
exist yet. A new owner writes the next number before it runs any request. Therefore an earlier owner
that does not know that it has lost its lease can change neither the record nor the journal.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader, BytesIO

import msgspec

from gateway.batch.file_and_batch_objects import BatchRecord
from gateway.batch.result_journal import JournalReader
from gateway.batch.s3_bucket import ConditionError, S3Bucket, StoredObject
from gateway.batch.s3_files import open_object
from gateway.batch.storage_interface import LeaseLostError

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0  # bounds of the seconds between two writes of a journal
OBJECTS_PER_PAUSE_S = 500  # a journal of this many objects is written a second less often
READ_AHEAD, READ_AHEAD_BYTES = 8, 16 * 1024 * 1024
MAX_TRIES = 5
WRITER = "writer"


class LeasedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stored record of a batch, together with the lease on it.

    owner    name of the process that has the lease; "" if none does
    lease_s  seconds without a renewal after which the lease ends
    version  number of changes by this owner, so that every renewal changes the entity tag
    """

    record: BatchRecord
    owner: str = ""
    lease_s: float = 0.0
    version: int = 0


class S3Batch:
    """A batch stored in S3, which this process has the right to run (its lease).

    It implements ClaimedBatch (storage_interface.py): access to the batch's record, input file and
    journal of results.
    """

    def __init__(
        self,
        bucket: S3Bucket,
        place: str,
        stored: LeasedRecord,
        etag: str,
        close_batch: Callable[[BatchRecord], None],
    ) -> None:
        # Initialize; `place` is the digest of the tenant's name and the batch's id, and
        # `close_batch` deletes what only unfinished batches need.
        self._bucket, self._place = bucket, place
        self._stored, self._etag, self._close_batch = stored, etag, close_batch
        self._owner = ""
        self._lock = threading.Lock()
        self._journal: S3Journal | None = None

    @property
    def record(self) -> BatchRecord:
        return self._stored.record

    def take(self, owner: str, lease_s: float) -> None:
        """Take the lease on the batch for the process named `owner`, for `lease_s` seconds.

        Raises LeaseLostError if another process has taken it first.
        """
        self._owner = owner
        with self._lock:
            self._change(LeasedRecord(self.record, owner, lease_s, 1))

    def renew(self) -> None:
        with self._lock:
            self._change(self._next())

    def save(self, record: BatchRecord) -> None:
        with self._lock:
            self._change(self._next(record=record))

    def finish(self, record: BatchRecord) -> None:
        self.save(record)
        self._close_batch(record)

    def release(self) -> None:
        with self._lock:
            try:
                self._change(LeasedRecord(self.record))
            except LeaseLostError:
                return

    def _next(self, **changes: BatchRecord) -> LeasedRecord:
        version = self._stored.version + 1
        return msgspec.structs.replace(self._stored, version=version, **changes)

    def _change(self, new: LeasedRecord) -> None:
        key, data = f"batches/{self._place}/record.json", msgspec.json.encode(new)
        for _ in range(MAX_TRIES):
            try:
                self._etag = self._bucket.replace(key, data, self._etag)
            except FileNotFoundError:
                raise LeaseLostError("the batch was deleted from the storage") from None
            except ConditionError:
                found, etag = self._bucket.read(key)
                if found != data:
                    self._check_own(msgspec.json.decode(found, type=LeasedRecord))
                self._etag = etag
                # An earlier write by this process may have succeeded although S3's answer was lost.
                if found != data:
                    continue
            self._stored = new
            return
        raise OSError(
            "cannot write the batch's record to S3: before each attempt, another process had "
            "changed the record"
        )

    def _check_own(self, found: LeasedRecord) -> None:
        if found.owner != self._owner:
            raise LeaseLostError(
                "this process has lost the lease of the batch: another process has taken over "
                "the batch"
            )

    # Input

    def open_input(self) -> BufferedReader:
        return open_object(self._bucket, f"inputs/{self._place}")

    def read_input(self, offset: int, size: int) -> bytes:
        return self._bucket.read_range(f"inputs/{self._place}", offset, size)

    # Journal

    def open_journal(self, reader: JournalReader) -> S3Journal:
        journal = S3Journal(self._bucket, f"journals/{self._place}/")
        journal.open(reader, self._stored.owner)
        # If the lease was lost meanwhile, its new owner must not be kept from writing.
        self.renew()
        self._journal = journal
        return journal

    def journal_lines(self) -> Iterator[bytes]:
        assert self._journal is not None
        return self._journal.lines()


class S3Journal:
    """The results of one batch in S3, stored as a sequence of numbered objects.

    Each object has one or more complete entries. The class implements BatchJournal
    (storage_interface.py).
    """

    def __init__(self, bucket: S3Bucket, prefix: str) -> None:
        # Initialize; the keys of the objects are `prefix` and a number.
        self._bucket, self._prefix = bucket, prefix
        self._name = secrets.token_hex(16)
        self._appended = 0
        self._next = 1
        self._is_open = True
        self._lock = threading.Lock()

    @property
    def pause_s(self) -> float:
        return min(MAX_PAUSE_S, MIN_PAUSE_S + self._next / OBJECTS_PER_PAUSE_S)

    def open(self, reader: JournalReader, owner: str) -> None:
        """Read all entries of the batch's journal into `reader`, and lock out earlier owners.

        A process that ran the batch before, and does not know that it has lost its lease, cannot
        append any more.

        owner  name of this process; an entry with it is written, which makes the next write of an
               earlier owner fail
        """
        line = msgspec.json.encode({"owner": owner}) + b"\n"
        while True:
            for entry in self._read_from(self._next):
                reader.feed(entry)
            try:
                # From now on, the next write of an earlier owner fails.
                self._create(line, f"{self._name}-0")
                return
            except ConditionError:  # the earlier owner has written this object meanwhile
                continue

    def append(self, data: bytes) -> None:
        with self._lock:
            if not self._is_open:
                raise OSError("cannot append to the batch's journal: it is closed")
            self._appended += 1
            writer = f"{self._name}-{self._appended}"
            while True:
                with suppress(ConditionError):
                    return self._create(data, writer)
                found = self._writer_of(self._key(self._next))
                if found.partition("-")[0] != self._name:
                    raise LeaseLostError(
                        "this process has lost the lease of the batch: another process has "
                        "taken over the batch"
                    )
                # This process has written the object itself, but did not receive S3's answer.
                self._next += 1
                if found == writer:
                    return None

    def _create(self, data: bytes, writer: str) -> None:
        self._bucket.create(self._key(self._next), data, {WRITER: writer})
        self._next += 1

    def _writer_of(self, key: str) -> str:
        try:
            return self._bucket.describe(key)[1].get(WRITER, "")
        except FileNotFoundError:  # the batch has ended, and its journal is gone
            return ""

    def close(self) -> None:
        with self._lock:
            self._is_open = False

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the batch's journal as they were after this process's last append."""
        yield from self._read(self._listed(1, self._next))

    def _read_from(self, number: int) -> Iterator[bytes]:
        # Yield the lines of all objects from this number on, and continue behind them.
        listed = self._listed(number, None)
        yield from self._read(listed)
        if listed:
            self._next = int(listed[-1].key.rpartition("/")[2]) + 1

    def _listed(self, start: int, end: int | None) -> list[StoredObject]:
        first, last = self._key(start), None if end is None else self._key(end)
        return [
            item
            for item in self._bucket.objects(self._prefix)
            if item.key >= first and (last is None or item.key < last)
        ]

    def _read(self, items: list[StoredObject]) -> Iterator[bytes]:
        with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="batch journal") as readers:
            for some in _groups(items):
                for data, _ in readers.map(self._bucket.read, [item.key for item in some]):
                    yield from BytesIO(data)

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:010}"


def _groups(items: list[StoredObject]) -> Iterator[list[StoredObject]]:
    # Yield objects in groups that may be in memory at the same time.
    group: list[StoredObject] = []
    for item in items:
        size = sum(member.size for member in group) + item.size
        if group and (len(group) >= READ_AHEAD or size > READ_AHEAD_BYTES):
            yield group
            group = []
        group.append(item)
    if group:
        yield group
