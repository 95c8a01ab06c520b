"""What a rule between values says, and how it walks plain data: used by checks.py and pairing.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.config.problems import Path


class Finding(msgspec.Struct, frozen=True):
    """Something wrong or doubtful at `path`; `on_key` when the key itself is the mistake rather than its value."""

    path: Path
    message: str
    on_key: bool = False


def get(data: Any, key: str) -> Any:
    """A member of a mapping; None where there is none, or no mapping."""
    return data.get(key) if isinstance(data, dict) else None


def items(data: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The mappings in a list or a mapping, each with its path."""
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
