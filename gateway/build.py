"""What runs: the program's version, and whether its hot path was compiled. Light to import."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def own_version() -> str:
    """Of the program that runs."""
    try:
        return version("penstock")
    except PackageNotFoundError:  # a checkout that nobody installed
        return "unknown"


def is_compiled() -> bool:
    """Whether requests pass extension modules (deploy/compile.py) instead of the sources."""
    found = find_spec("gateway.relay")
    return found is not None and str(found.origin).endswith(tuple(EXTENSION_SUFFIXES))
