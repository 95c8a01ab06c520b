"""Creates the storage of files and batches that the configuration selects: a disk or S3."""

from __future__ import annotations

from pathlib import Path

from gateway.batch.disk_store import DiskStore
from gateway.batch.s3_bucket import S3Bucket
from gateway.batch.s3_store import S3Store
from gateway.batch.storage_interface import BatchStorage
from gateway.config import BatchApi


def create_storage(section: BatchApi) -> BatchStorage:
    """Create the storage that this section describes, without using it yet.

    Raises OSError if that fails.
    """
    if section.s3 is not None:
        return S3Store(S3Bucket(section.s3), section.lease)
    assert section.dir is not None
    return DiskStore(Path(section.dir), section.lease)
