"""Objects of S3 as files: reading by ranges, and writing in parts with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader, RawIOBase
from threading import Lock

from gateway.batch.s3_bucket import ObjectParts, S3Bucket
from gateway.batch.storage_interface import StorageQuota, quota_exceeded

READ_BYTES = 1024 * 1024  # bytes that one request reads
PART_BYTES = 5 * 1024 * 1024  # size of a part, which is held in memory; the minimum for S3
MAX_PARTS = 9000  # maximum parts of one object; S3 accepts 10,000


def open_object(bucket: S3Bucket, key: str) -> BufferedReader:
    """Open an object of the bucket for reading, in requests of READ_BYTES bytes.

    Raises FileNotFoundError if the object does not exist.
    """
    return BufferedReader(_ObjectReader(bucket, key, bucket.describe(key)[0].size), READ_BYTES)


class _ObjectReader(RawIOBase):
    # Each read is a request of its own: no connection stays open while a client reads slowly.

    def __init__(self, bucket: S3Bucket, key: str, size: int) -> None:
        super().__init__()
        self._bucket, self._key, self._size = bucket, key, size
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._offset, self._size)[whence]
        self._offset = max(0, base + offset)
        return self._offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = min(len(buffer), self._size - self._offset)
        if size <= 0:
            return 0
        data = self._bucket.read_range(self._key, self._offset, size)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)


class ObjectWriter:
    """Writes one object: a small one with a single request, a larger one in parts.

    size  number of bytes written so far
    """

    def __init__(self, bucket: S3Bucket, key: str, most_bytes: int) -> None:
        """Create a writer whose parts are large enough for an object of about `most_bytes`."""
        self._bucket, self.key = bucket, key
        self._part_bytes = max(PART_BYTES, -(-most_bytes // MAX_PARTS))
        self._pending = bytearray()
        self._parts: ObjectParts | None = None
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self._pending += data
        while len(self._pending) > self._part_bytes:
            if self._parts is None:
                self._parts = self._bucket.start_parts(self.key)
            self._parts.write(bytes(self._pending[: self._part_bytes]))
            del self._pending[: self._part_bytes]

    def complete(self) -> None:
        """Write the remaining bytes and complete the object, which then exists."""
        data, self._pending = bytes(self._pending), bytearray()
        if self._parts is None:
            self._bucket.write(self.key, data)
            return
        self._parts.write(data)
        self._parts.complete()
        self._parts = None

    def abort(self) -> None:
        """Discard all bytes written so far, unless the object is complete."""
        self._pending = bytearray()
        if self._parts is not None:
            self._parts.abort()
            self._parts = None


def write_lines(writer: ObjectWriter, lines: Iterator[bytes]) -> int:
    """Write lines as one object, and return its size in bytes.

    If there are no lines, no object is written.
    """
    try:
        for line in lines:
            writer.write(line)
        if writer.size:
            writer.complete()
    except BaseException:
        writer.abort()
        raise
    return writer.size


class S3Upload:
    """A file that is being received. commit_upload() makes it visible; close() discards it."""

    def __init__(
        self, file_id: str, writer: ObjectWriter, most_bytes: int, quota: StorageQuota
    ) -> None:
        # Initialize; `most_bytes` are what is left of the tenant's quota.
        self.id, self.writer, self.quota = file_id, writer, quota
        self._most_bytes = most_bytes
        self._lock = Lock()
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > self._most_bytes:
            raise quota_exceeded()
        with self._lock:
            self.writer.write(data)

    def complete(self) -> None:
        """Write the remaining bytes and complete the file's content, which then exists."""
        with self._lock:
            self.writer.complete()

    def close(self) -> None:
        with self._lock:
            self.writer.abort()
