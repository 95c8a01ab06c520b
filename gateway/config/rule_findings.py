"""The result type of rules between configuration values, and helpers to walk over plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.config.problems import Path


class RuleFinding(msgspec.Struct, frozen=True):
    """An error or warning at `path` in a configuration; `is_on_key` if it concerns the key rather
    than its value.
    """

    path: Path
    message: str
    is_on_key: bool = False


def get_member(data: Any, key: str) -> Any:
    """Return a member of a mapping, or None if the member is missing or `data` is no mapping."""
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
