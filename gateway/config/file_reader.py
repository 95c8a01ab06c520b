"""Reads the gateway's configuration file and the files that it refers to."""

from __future__ import annotations

from pathlib import Path

from gateway.config.yaml_source import MAX_FILE_BYTES, NotARegularFileError, invalid_file


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a file, cut off after `limit` + 1 bytes.

    A result longer than `limit` shows the caller that the file is too long. Raises OSError, or
    NotARegularFileError for a folder, pipe or device.
    """
    if path.exists() and not path.is_file():  # opening a pipe would block until it is written
        raise NotARegularFileError(path)
    with path.open("rb") as file:
        return file.read(limit + 1)


def read_config_file(path: Path) -> bytes:
    """Return the content of the configuration file; raise ConfigError if it cannot be read."""
    try:
        return read_file(path, MAX_FILE_BYTES)
    except NotARegularFileError:
        raise invalid_file(
            str(path),
            "the configuration file is not a regular file, but for example a folder or a pipe",
        ) from None
    except OSError as error:
        raise invalid_file(
            str(path), f"the configuration file cannot be read: {error.strerror}"
        ) from None
