"""Leases on batches: at most one gateway process of a machine runs a batch at a time.

A lease names its owner, and when it expires. A running owner also holds a lock on a file. When the
process dies, the kernel frees the lock, and other processes take over its batches immediately. The
expiry is needed for an owner that hangs. All calls block; use them in threads.
"""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from gateway.batch.disk_files import locked
from gateway.batch.storage_interface import LeaseLostError


class Lease(msgspec.Struct, frozen=True):
    """The content of a lease file, which says which process may run a batch, and until when.

    `expires_at` is a Unix time.
    """

    owner: str
    expires_at: float


class BatchOwner:
    """A gateway process that runs batches: it takes, renews and releases leases on them.

    A lease is the exclusive right to run one batch for some time.
    """

    def __init__(self, folder: Path, lease_s: float) -> None:
        """Create an owner of batches.

        folder   the folder with one locked file for each running owner
        lease_s  seconds after which a lease ends unless it is renewed
        """
        self.name = secrets.token_hex(16)
        self.lease_s = lease_s
        self._folder = folder
        self._lock: IO[bytes] | None = None

    def open(self) -> None:
        """Create and lock the file that shows that this process runs.

        The files of processes that have ended are deleted.
        """
        # The file gets its name only once it is locked. Otherwise another process could find it
        # unlocked, and conclude that its owner has ended.
        part = self._folder / f"{self.name}.part"
        self._lock = part.open("xb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.rename(self._folder / self.name)
        for path in self._folder.iterdir():
            if path.suffix != ".part" and not _is_locked(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            (self._folder / self.name).unlink(missing_ok=True)
            self._lock.close()

    def claim(self, batch: Path, now: float) -> bool:
        """Take or renew the lease on the batch in this folder; return whether this process has it.

        The lease is refused while another running owner has one that has not expired.
        """
        with locked(batch / "owner") as file:
            lease = _read_lease(file)
            if lease is not None and lease.owner != self.name and self._is_valid(lease, now):
                return False
            file.seek(0)
            file.truncate()
            file.write(msgspec.json.encode(Lease(self.name, now + self.lease_s)))
            file.flush()
            return True

    def change(self, batch: Path, call: Callable[[], None]) -> None:
        """Call `call`, which changes the batch in this folder, if this process has its lease.

        Raises LeaseLostError, without the call, if another process has the lease; that process
        continues from the stored state.
        """
        with locked(batch / "owner") as file:
            lease = _read_lease(file)
            if lease is None or lease.owner != self.name:
                raise LeaseLostError(
                    "this process has lost the lease of the batch: another process has taken "
                    "over the batch"
                )
            call()

    def release(self, batch: Path) -> None:
        """Release this owner's lease on a batch; another process may then take it immediately."""
        with locked(batch / "owner") as file:
            lease = _read_lease(file)
            if lease is not None and lease.owner == self.name:
                file.truncate(0)

    def _is_valid(self, lease: Lease, now: float) -> bool:
        return lease.expires_at > now and _is_locked(self._folder / lease.owner)


def _read_lease(file: IO[bytes]) -> Lease | None:
    file.seek(0)
    try:
        return msgspec.json.decode(file.read(), type=Lease)
    except msgspec.DecodeError:
        return None


def _is_locked(path: Path) -> bool:
    # Return whether a running process holds the lock on an owner's file.
    try:
        # Opening the file again gives a separate lock, even in the process that holds one already.
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
