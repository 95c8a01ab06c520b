"""What a supervisor hands a worker when it starts: through a pipe, so that the secret is in no environment."""

from __future__ import annotations

from pathlib import Path
from struct import Struct

import msgspec

LENGTH = Struct("<I")
CAP_BYTES = 16 << 20


class Settings(msgspec.Struct, frozen=True):
    """number   its place among the workers            file, text    the configuration and what problems call it
    listener the inherited socket of the API port      hub, admin    sockets in the supervisor's folder
    secret   what workers have in common               reload_file   the file that a reload reads; None: there is none
    drained  names of endpoints that were drained by hand
    version  the number of the configuration's version; None: it is the first worker of all, and finds it
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
    def reloads(self) -> Path | None:
        return None if self.reload_file is None else Path(self.reload_file)


def packed(settings: Settings) -> bytes:
    """With its length before it, for the pipe."""
    body = msgspec.msgpack.encode(settings)
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> Settings:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=Settings)
