"""Checks the patterns of model names, such as `claude-*`, in a configuration.

Patterns may be aliases of models, or models that a tenant's key may use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.config.problems import Path, show_path
from gateway.config.rule_findings import RuleFinding, get_member, iter_mappings
from gateway.util.name_patterns import NamePattern, is_pattern, parse_pattern


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each invalid pattern of model names in the configuration.

    A pattern is invalid if it has more than one `*`, or if it is in a place where only plain names
    are allowed.
    """
    for path, model in iter_mappings(get_member(data, "models"), ("models",)):
        name = get_member(model, "name")
        if isinstance(name, str) and is_pattern(name):
            text = "is a pattern, and only aliases may be patterns; give the model a plain name"
            yield RuleFinding((*path, "name"), text)
    for path, text in (*_texts(data, "models", "aliases"), *_allowed(data)):
        if text.count("*") > 1:
            yield RuleFinding(path, "has more than one *; a pattern has one, as in claude-*")


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield a warning for each pair of alias patterns of two models that can match the same name.

    The warning says which of the two patterns gets the names that match both.
    """
    seen: list[tuple[Path, NamePattern]] = []
    for path, text in _texts(data, "models", "aliases"):
        if text.count("*") != 1:
            continue
        pattern = parse_pattern(text)
        for other_path, other in seen:
            if path[1] != other_path[1] and pattern != other and pattern.overlaps(other):
                winner = max(pattern, other, key=lambda one: one.rank)
                other_key = show_path(other_path)
                yield RuleFinding(
                    path,
                    f"overlaps {str(other)!r} ({other_key}): {str(winner)!r} gets names that match "
                    "both",
                )
        seen.append((path, pattern))


def _texts(data: Any, section: str, key: str) -> Iterator[tuple[Path, str]]:
    for path, entry in iter_mappings(get_member(data, section), (section,)):
        yield from _list(get_member(entry, key), (*path, key))


def _allowed(data: Any) -> Iterator[tuple[Path, str]]:
    yield from _texts(data, "tenants", "models")
    for path, tenant in iter_mappings(get_member(data, "tenants"), ("tenants",)):
        for key_path, key in iter_mappings(
            get_member(tenant, "scoped_keys"), (*path, "scoped_keys")
        ):
            yield from _list(get_member(key, "models"), (*key_path, "models"))


def _list(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    for index, text in enumerate(value if isinstance(value, list) else ()):
        if isinstance(text, str):
            yield (*path, index), text
