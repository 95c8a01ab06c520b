"""Checks output paths of commands before the work begins. Nothing is written here."""

from __future__ import annotations

import os
from pathlib import Path

from command_line import UsageError


def check_writable(path: Path | None) -> Path | None:
    """Return the path if it can be written, as the callback of a command-line option.

    Raises UsageError otherwise.
    """
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(
            f"{path} cannot be written; check that its directory exists and is writable"
        )
    return path
