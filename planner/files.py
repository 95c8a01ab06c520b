"""Files that commands write: whether they can be written is asked before any work is done. Nothing is written here."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def writable(path: Path | None) -> Path | None:
    """Callback of an option that names a file to write. Raises typer.BadParameter when it could not be written."""
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: is its directory there, and may you write in it?")
    return path
