"""The settings that a supervisor sends to a new worker process through a pipe.

A pipe keeps the shared secret out of the environment and the command line.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct

import msgspec

LENGTH = Struct("<I")
MAX_SETTINGS_BYTES = 16 << 20


class WorkerLaunchSettings(msgspec.Struct, frozen=True):
    """The settings with which a supervisor starts a worker.

    number       number of the worker among all workers
    file         name of the configuration file, for messages about problems
    text         the configuration's text
    listener     file descriptor of the inherited API socket
    hub          path of the unix socket over which the workers exchange state
    admin        path of the unix socket of the worker's admin server
    secret       secret key that all workers share
    reload_file  the file that a reload reads; None if there is none
    version      number of the configuration version; None for the first worker, which determines it
    drained      names of endpoints that an operator has drained
    """

    number: int
    file: str
    text: bytes
    listener: int
    hub: str
    admin: str
    secret: bytes
    reload_file: str | None
    version: int | None
    drained: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Settings(worker {self.number})"

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
