"""The versions that were in force: the last twenty, in memory, and in a folder if the operator gave one.

Texts are kept as they were written: references, not what they led to. A text with a secret in it stays in memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from gateway.config import Loaded
from gateway.config.compare import Change

log = logging.getLogger("penstock")

KEEP = 20
FILE_CAP_BYTES = 4 << 20


class Version(msgspec.Struct, frozen=True):
    """One configuration that was put in force.

    number   counts up, a rollback included      at       when, Unix time in seconds
    trigger  start, file, secret (one that it names), signal, command, admin, rollback or auto_rollback
    file     name of the text's source           text     as written; None when it was not kept
    changes  against the version before
    """

    number: int
    at: float
    trigger: str
    file: str
    hash: str
    changes: tuple[Change, ...] = ()
    text: str | None = None

    @property
    def etag(self) -> str:
        """What If-Match is compared with: of this version and no other, even of one with an equal text."""
        return f'"{self.number}-{self.hash}"'


def made(number: int, at: float, trigger: str, loaded: Loaded, changes: tuple[Change, ...]) -> Version:
    """The version that `loaded` becomes."""
    digest = hashlib.sha256(loaded.text).hexdigest()[:12]
    return Version(number, at, trigger, loaded.file, digest, changes, loaded.text.decode("utf-8-sig") or None)


class Versions:
    """The last KEEP versions, oldest first. One writer, the Reloader."""

    def __init__(self, folder: Path | None, told: int | None = None) -> None:
        """`told` is the number of what other workers have in force already, if they do, whatever the folder holds: what
        it has with a higher one was in force in none of them."""
        self._folder = folder
        self.told = told
        kept = [] if folder is None else _read_all(folder)
        self._kept = [each for each in kept if told is None or each.number <= told]

    def all(self) -> tuple[Version, ...]:
        return tuple(self._kept)

    def find(self, number: int) -> Version | None:
        return next((each for each in self._kept if each.number == number), None)

    @property
    def next_number(self) -> int:
        return self._kept[-1].number + 1 if self._kept else 1

    def add(self, version: Version) -> None:
        self._kept = [*(each for each in self._kept if each.number != version.number), version][-KEEP:]

    def write(self, version: Version, *, in_clear: bool) -> None:
        """Into the folder, if there is one, whole or not at all; call it in a thread. Raises OSError."""
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = msgspec.structs.replace(version, text=None) if in_clear else version
        target = self._folder / _file_name(version.number)
        fresh = target.with_suffix(".new")
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(msgspec.json.encode(kept))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
        for old in sorted(self._folder.glob("v*.json"))[:-KEEP]:
            old.unlink()


def _file_name(number: int) -> str:
    return f"v{number:08d}.json"


def _read_all(folder: Path) -> list[Version]:
    found = []
    for path in sorted(folder.glob("v*.json"))[-KEEP:]:
        try:
            with path.open("rb") as file:
                found.append(msgspec.json.decode(file.read(FILE_CAP_BYTES), type=Version))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s is no version of a configuration and is passed over: %s", path, error)
    return sorted(found, key=lambda version: version.number)
