"""The running program: its version, and whether its hot path is compiled.

The module imports little, so that `penstock version` is fast.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@cache
def program_version() -> str:
    """Return the version of the running program, or "unknown" if it is not installed.

    It is read once, because parsing the metadata of the distribution takes 2 ms.
    """
    try:
        return version("penstock")
    except PackageNotFoundError:  # a source checkout that is not installed
        return "unknown"


def build_kind() -> str:
    """Return how the code of the hot path runs: "compiled" (extension modules) or "sources"."""
    return "compiled" if is_compiled() else "sources"


def is_compiled() -> bool:
    """Return whether compiled extension modules are used instead of their Python sources."""
    spec = find_spec("gateway.protocol.response.relay")
    return spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))


def version_facts() -> dict[str, str | bool]:
    """Return the output of `penstock version --json`: versions, and whether code is compiled."""
    return {
        "penstock": program_version(),
        "python": platform.python_version(),
        "compiled": is_compiled(),
    }


def version_line() -> str:
    """Return the line that `penstock version` prints: versions, and how the hot path runs."""
    return f"penstock {program_version()} (Python {platform.python_version()}, {build_kind()})"
