"""Checks that output files of commands can be written, before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

from command_line import UsageError


def check_writable(path: Path | None) -> Path | None:
    """Return the path if it can be written. Used to check a command-line option.

    Raises UsageError if it cannot be written.
    """
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(
            f"{path} cannot be written; check that its directory exists and is writable"
        )
    return path
