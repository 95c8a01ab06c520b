"""One bucket of an S3-compatible storage: whole objects, ranges, lists and conditional writes.

Only this module uses botocore (the extra `s3`). Its errors become OSError, with S3's error code but
without headers or credentials. All calls block.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec

from gateway.batch.storage_interface import StorageUnreachableError
from gateway.config import BatchS3, Secret

log = logging.getLogger("penstock")

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 3.0, 30.0
MAX_ATTEMPTS = 3
MAX_CONNECTIONS = 64
MAX_COPY_BYTES = 5 * 1024**3  # largest object that one call copies; larger ones are copied in parts
COPY_PART_BYTES = 1024**3
DELETED_AT_ONCE = 1000


class ConditionError(OSError):
    """Raised if the condition of a conditional write is not met. Nothing was written."""


class StoredObject(msgspec.Struct, frozen=True):
    """One object in a list of the bucket's objects; `modified_at` is a Unix time in seconds."""

    key: str
    etag: str
    size: int
    modified_at: float


class S3Bucket:
    """The objects of one bucket whose keys begin with a prefix; methods take keys without it."""

    def __init__(self, section: BatchS3) -> None:
        """Create the bucket from the section `batch.s3`. Call connect() before any other method."""
        self.name = f"s3://{section.bucket}/{section.prefix}"
        self._bucket = section.bucket
        self._prefix = f"{section.prefix.strip('/')}/" if section.prefix.strip("/") else ""
        self._section = section
        self._client: Any = None
        self._deletes_many = True

    def connect(self) -> None:
        """Create the S3 client, without sending a request. Raises OSError if that fails."""
        if self._client is None:
            self._client = _create_client(self._section)

    def read(self, key: str) -> tuple[bytes, str]:
        """Return an object's content and its entity tag.

        Raises FileNotFoundError if it does not exist.
        """
        with _as_os_error("GetObject"):
            answer = self._client.get_object(**self._at(key))
            return answer["Body"].read(), answer["ETag"]

    def read_range(self, key: str, offset: int, size: int) -> bytes:
        """Return at most `size` bytes of an object from `offset` on; at least one must exist."""
        last = offset + size - 1
        with _as_os_error("GetObject"):
            answer = self._client.get_object(**self._at(key), Range=f"bytes={offset}-{last}")
            data: bytes = answer["Body"].read()
            return data

    def describe(self, key: str) -> tuple[StoredObject, Mapping[str, str]]:
        """Return an object's size, date and metadata.

        Raises FileNotFoundError if it does not exist.
        """
        with _as_os_error("HeadObject"):
            answer = self._client.head_object(**self._at(key))
        modified_at = answer["LastModified"].timestamp()
        found = StoredObject(key, answer["ETag"], answer["ContentLength"], modified_at)
        return found, answer.get("Metadata", {})

    def write(self, key: str, data: bytes) -> None:
        with _as_os_error("PutObject"):
            self._client.put_object(**self._at(key), Body=data)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str]) -> None:
        """Write an object that must not exist yet. Raises ConditionError if it exists."""
        with _as_os_error("PutObject"):
            self._client.put_object(
                **self._at(key), Body=data, IfNoneMatch="*", Metadata=dict(metadata)
            )

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """Replace an object if its entity tag is still `etag`, and return the new entity tag.

        Raises ConditionError if the entity tag differs, and FileNotFoundError if the object does
        not exist.
        """
        with _as_os_error("PutObject"):
            answer = self._client.put_object(**self._at(key), Body=data, IfMatch=etag)
        tag: str = answer["ETag"]
        return tag

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects whose keys begin with `prefix`, in the order of their keys."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        for page in _each(pages, "ListObjectsV2"):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                modified_at = item["LastModified"].timestamp()
                yield StoredObject(key, item["ETag"], item["Size"], modified_at)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects of the bucket by their keys. Missing objects are ignored."""
        remaining = iter(keys)
        while some := list(islice(remaining, DELETED_AT_ONCE)):
            if len(some) == 1 or not self._delete_many(some):
                for key in some:
                    with _as_os_error("DeleteObject"):
                        self._client.delete_object(**self._at(key))

    def _delete_many(self, keys: list[str]) -> bool:
        # Delete objects by one request; return whether the storage could do that.
        if not self._deletes_many:
            return False
        names = [{"Key": self._prefix + key} for key in keys]
        try:
            with _as_os_error("DeleteObjects"):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": names, "Quiet": True}
                )
        except StorageUnreachableError:
            raise
        except OSError as error:
            log.warning(
                "S3: the bucket does not delete several objects of %s in one request; "
                "they are deleted one by one: %s",
                self.name,
                error,
            )
            self._deletes_many = False
            return False
        return not answer.get("Errors")

    def copy(self, source: str, key: str) -> None:
        """Copy an object inside the bucket. Raises FileNotFoundError if `source` does not exist."""
        size = self.describe(source)[0].size
        origin = {"Bucket": self._bucket, "Key": self._prefix + source}
        if size <= MAX_COPY_BYTES:
            with _as_os_error("CopyObject"):
                self._client.copy_object(**self._at(key), CopySource=origin)
            return
        parts = self.start_parts(key)
        for offset in range(0, size, COPY_PART_BYTES):
            last = min(offset + COPY_PART_BYTES, size) - 1
            parts.copy(origin, f"bytes={offset}-{last}")
        parts.complete()

    def start_parts(self, key: str) -> ObjectParts:
        """Start to write the object `key` in parts, and return the unfinished upload."""
        with _as_os_error("CreateMultipartUpload"):
            answer = self._client.create_multipart_upload(**self._at(key))
        return ObjectParts(self._client, self._at(key), answer["UploadId"])

    def abort_parts(self, before: float) -> None:
        """Discard unfinished uploads in parts that were started before the Unix time `before`."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        for page in _each(pages, "ListMultipartUploads"):
            for upload in page.get("Uploads", ()):
                if upload["Initiated"].timestamp() < before:
                    place = {"Bucket": self._bucket, "Key": upload["Key"]}
                    ObjectParts(self._client, place, upload["UploadId"]).abort()

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}


class ObjectParts:
    """An object that is being written in parts. It exists after complete()."""

    def __init__(self, client: Any, place: dict[str, Any], upload_id: str) -> None:
        self._client = client
        self._upload = {**place, "UploadId": upload_id}
        self._parts: list[dict[str, Any]] = []

    def write(self, data: bytes) -> None:
        """Write the next part of the object. Each part except the last must have 5 MiB or more."""
        number = len(self._parts) + 1
        with _as_os_error("UploadPart"):
            answer = self._client.upload_part(**self._upload, PartNumber=number, Body=data)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})

    def copy(self, origin: dict[str, str], span: str) -> None:
        """Copy the byte range `span` of another object as the next part of this one."""
        number = len(self._parts) + 1
        with _as_os_error("UploadPartCopy"):
            answer = self._client.upload_part_copy(
                **self._upload, PartNumber=number, CopySource=origin, CopySourceRange=span
            )
        etag = answer["CopyPartResult"]["ETag"]
        self._parts.append({"PartNumber": number, "ETag": etag})

    def complete(self) -> None:
        with _as_os_error("CompleteMultipartUpload"):
            self._client.complete_multipart_upload(
                **self._upload, MultipartUpload={"Parts": self._parts}
            )

    def abort(self) -> None:
        """Discard the uploaded parts of an object, unless the object is complete."""
        try:
            with _as_os_error("AbortMultipartUpload"):
                self._client.abort_multipart_upload(**self._upload)
        except FileNotFoundError:
            pass


def _create_client(section: BatchS3) -> Any:
    try:
        from botocore.config import Config
        from botocore.session import get_session
    except ImportError:
        raise OSError(
            errno.ENOPKG,
            "the section batch.s3 needs the Python package botocore; install it "
            "with: pip install 'penstock[s3]'",
        ) from None
    addressing = {None: "auto", True: "path", False: "virtual"}[section.path_style]
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=MAX_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        s3={"addressing_style": addressing},
        # Many S3-compatible storages refuse the checksums that botocore adds by default.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    with _as_os_error("the configuration"):
        return get_session().create_client(
            "s3",
            region_name=section.region,
            endpoint_url=section.endpoint_url,
            aws_access_key_id=_revealed(section.access_key_id),
            aws_secret_access_key=_revealed(section.secret_access_key),
            aws_session_token=_revealed(section.session_token),
            config=config,
        )


def _revealed(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


def _each(pages: Iterable[dict[str, Any]], operation: str) -> Iterator[dict[str, Any]]:
    iterator = iter(pages)
    while True:
        with _as_os_error(operation):
            page = next(iterator, None)
        if page is None:
            return
        yield page


@contextmanager
def _as_os_error(operation: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise _refused(operation, error.response) from None
    except BotoCoreError as error:
        # The error's text may contain data that was sent to S3, so only its class is reported.
        message = f"S3 cannot be used for {operation}: {type(error).__name__}"
        raise StorageUnreachableError(errno.EIO, message) from None


def _refused(operation: str, response: Mapping[str, Any]) -> OSError:
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(response.get("Error", {}).get("Code", ""))[:64]
    message = f"S3 answers {operation} with status {status}, {code or 'no code'}"
    if code in ("404", "NoSuchKey", "NotFound", "NoSuchUpload"):
        return FileNotFoundError(errno.ENOENT, message)
    if status in (409, 412):
        return ConditionError(errno.EEXIST, message)
    if status >= 500 or status == 429:
        return StorageUnreachableError(errno.EIO, message)
    return OSError(errno.EIO, message)
