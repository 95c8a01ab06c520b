"""The history of applied configurations: the last twenty, in memory and optionally on disk.

Each text is stored as it was written, with references such as ${NAME} in place of secrets. A text
that contains a secret itself is not written to disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from gateway.config import LoadedConfig
from gateway.config.diff import ConfigChange

log = logging.getLogger("penstock")

MAX_VERSIONS = 20
FILE_CAP_BYTES = 4 << 20


class Version(msgspec.Struct, frozen=True):
    """One configuration that has been applied.

    number   number of the version; every change increases it, rollbacks too
    at       Unix time in seconds at which it was applied
    trigger  start, file, secret (a file that the text refers to), signal, command, admin, rollback,
             auto_rollback, auto (automatic policy selection)
    file     name of the text's source
    changes  differences from the version before
    text     the configuration text as written; None if it was not stored
    reason   why the configuration was applied; empty if its author gave no reason
    """

    number: int
    at: float
    trigger: str
    file: str
    hash: str
    changes: tuple[ConfigChange, ...] = ()
    text: str | None = None
    reason: str = ""

    @property
    def etag(self) -> str:
        """Return the ETag of this configuration version, to be sent back in an If-Match header.

        Two versions have different ETags even if their texts are equal.
        """
        return f'"{self.number}-{self.hash}"'


def create_version(
    number: int,
    at: float,
    trigger: str,
    loaded: LoadedConfig,
    changes: tuple[ConfigChange, ...],
    reason: str = "",
) -> Version:
    """Create the version of a loaded configuration for the history.

    The parameters are the fields of Version; `at` is the Unix time in seconds.
    """
    digest = hashlib.sha256(loaded.text).hexdigest()[:12]
    text = loaded.text.decode("utf-8-sig") or None
    return Version(number, at, trigger, loaded.file, digest, changes, text, reason)


class VersionHistory:
    """Keeps the last MAX_VERSIONS configuration versions. Only the Reloader changes it.

    It is in the order of the versions, oldest first.
    """

    def __init__(self, folder: Path | None, current: int | None = None) -> None:
        """Create the history from the versions stored in `folder`; without a folder, it is empty.

        current  the version that the other workers use; None in the first worker. Stored versions
                 with a higher number are ignored, because the other workers never used them
        """
        self._folder = folder
        self.current = current
        stored = [] if folder is None else _read_all(folder)
        self._versions = [
            version for version in stored if current is None or version.number <= current
        ]

    def all(self) -> tuple[Version, ...]:
        return tuple(self._versions)

    def find(self, number: int) -> Version | None:
        return next((version for version in self._versions if version.number == number), None)

    @property
    def next_number(self) -> int:
        return self._versions[-1].number + 1 if self._versions else 1

    def add(self, version: Version) -> None:
        """Append a configuration version. It replaces a stored version with the same number."""
        others = [other for other in self._versions if other.number != version.number]
        self._versions = [*others, version][-MAX_VERSIONS:]

    def write(self, version: Version, *, has_secret: bool) -> None:
        """Write a version to the history's folder atomically, if there is a folder.

        Call this in a thread. Raises OSError if the version cannot be written.

        has_secret  whether the text contains a secret in clear; if so, the text is left out
        """
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stored = msgspec.structs.replace(version, text=None) if has_secret else version
        target = self._folder / _file_name(version.number)
        temporary = target.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        handle = os.open(temporary, flags, 0o600)
        with open(handle, "wb") as file:
            file.write(msgspec.json.encode(stored))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        for old in sorted(self._folder.glob("v*.json"))[:-MAX_VERSIONS]:
            old.unlink()


def _file_name(number: int) -> str:
    return f"v{number:08d}.json"


def _read_all(folder: Path) -> list[Version]:
    versions = []
    for path in sorted(folder.glob("v*.json"))[-MAX_VERSIONS:]:
        try:
            with path.open("rb") as file:
                content = file.read(FILE_CAP_BYTES)
            versions.append(msgspec.json.decode(content, type=Version))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning(
                "the file %s is not a valid configuration version and is ignored: %s", path, error
            )
    return sorted(versions, key=lambda version: version.number)
