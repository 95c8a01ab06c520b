"""The result type of configuration checks, and helpers to read plain data of unknown form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.config.problems import Path, show_path


class RuleFinding(msgspec.Struct, frozen=True):
    """An error or warning about the value at `path` in a configuration.

    `is_on_key` is True if it concerns the key at `path` and not the value.
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


def iter_endpoints(data: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        yield from iter_mappings(get_member(pool, "endpoints"), (*path, "endpoints"))


def iter_tls_sections(data: Any) -> Iterator[tuple[Path, Any]]:
    for name in ("api", "admin"):
        yield (
            ("listeners", name, "tls"),
            get_member(get_member(get_member(data, "listeners"), name), "tls"),
        )
    for path, spec in iter_endpoints(data):
        yield (*path, "tls"), get_member(spec, "tls")
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        yield (
            (*path, "discover", "endpoint", "tls"),
            get_member(get_member(get_member(pool, "discover"), "endpoint"), "tls"),
        )
    yield (
        ("shared", "redis", "tls"),
        get_member(get_member(get_member(data, "shared"), "redis"), "tls"),
    )


def find_repeated(values: Iterator[tuple[Path, str]], what: str) -> Iterator[RuleFinding]:
    """Yield an error for each text in `values` that repeats an earlier one.

    values  (path in the configuration, text) of each text
    what    subject of the error message, such as "the name of an endpoint"
    """
    seen: dict[str, Path] = {}
    for path, text in values:
        if text in seen:
            yield RuleFinding(path, f"{what} is already taken by {show_path(seen[text])}")
        seen.setdefault(text, path)
