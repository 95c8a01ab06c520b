"""The values that each worker process gets at its launch, from its supervisor through a pipe.

A pipe keeps the shared secret out of the environment and the command line.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct

import msgspec

LENGTH = Struct("<I")
MAX_SETTINGS_BYTES = 16 << 20


class WorkerSettings(msgspec.Struct, frozen=True):
    """The settings of a worker, one of several gateway processes on this machine.

    hub      path of the unix socket over which the workers exchange state
    secret   secret key that all workers share
    number   number of the worker, from 0; only worker 0 writes the version history to disk
    admin    path of the unix socket of its admin server
    version  number of the current configuration version; None in the first worker
    drained  names of the endpoints that an operator has drained
    """

    hub: str
    secret: bytes
    number: int
    admin: str
    version: int | None
    drained: tuple[str, ...]

    def __repr__(self) -> str:
        return f"WorkerSettings({self.number})"


class WorkerLaunchSettings(msgspec.Struct, frozen=True):
    """The settings with which a supervisor starts a worker.

    worker       the values that distinguish this worker, or that all workers share
    file         name of the configuration file, for messages about problems
    text         the configuration's text
    listener     file descriptor of the inherited API socket
    reload_file  the file that a reload reads; None if there is none
    """

    worker: WorkerSettings
    file: str
    text: bytes
    listener: int
    reload_file: str | None

    def __repr__(self) -> str:
        return f"Settings(worker {self.worker.number})"

    @property
    def reload_path(self) -> Path | None:
        """Return the path of the file that a reload reads; None if there is none."""
        return None if self.reload_file is None else Path(self.reload_file)


def pack_settings(settings: WorkerLaunchSettings) -> bytes:
    """Return the worker's settings as bytes, preceded by their length."""
    body = msgspec.msgpack.encode(settings)
    return LENGTH.pack(len(body)) + body


def unpack_settings(body: bytes) -> WorkerLaunchSettings:
    """Decode a worker's settings from the bytes after the length. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=WorkerLaunchSettings)
