"""Functions for single files: replace durably, read a record, lock, delete a folder."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec

T = TypeVar("T")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content. After a crash, the file has either the old or the new content."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    with part.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that the names of its files survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_record(path: Path, kind: type[T]) -> T | None:
    """Read a stored record of type `kind`. Returns None if it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def delete_folder(folder: Path) -> None:
    """Delete a folder and its files. Files that cannot be deleted are ignored."""
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
