"""The result type of checks of configuration values, and helpers to walk over plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.config.problems import Path


class RuleFinding(msgspec.Struct, frozen=True):
    """An error or warning about the value at `path` in a configuration.

    `is_on_key` is whether it concerns the key rather than its value.
    """

    path: Path
    message: str
    is_on_key: bool = False


def get_member(data: Any, key: str) -> Any:
    """Return a member of a mapping, or None if the member is missing or `data` is not a mapping."""
    return data.get(key) if isinstance(data, dict) else None


def iter_mappings(data: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    pairs: Any = (
        enumerate(data)
        if isinstance(data, list)
        else data.items()
        if isinstance(data, dict)
        else ()
    )
    for key, item in pairs:
        if isinstance(item, dict):
            yield (*path, key), item
