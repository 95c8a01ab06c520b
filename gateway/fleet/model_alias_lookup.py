"""Looks up values by model name: exact names and aliases first, then patterns with `*`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TypeVar

from gateway.util.name_patterns import NameFilter, is_pattern, parse_pattern

T = TypeVar("T")


class NameTable(dict[str, T]):
    """Maps exact model names to values; table[name] also matches patterns such as `llama-*`.

    An exact name takes precedence over all patterns; among matching patterns, the longest does.
    Iteration, `in` and get() use the exact names only.
    """

    __slots__ = ("_filter", "_patterns", "_reserved")

    def __init__(
        self,
        values: Mapping[str, T],
        others: Set[str] = frozenset(),
        permitted: Iterable[str] | None = None,
    ) -> None:
        """Create a table with values by model name or pattern.

        others     names and patterns without a value. A name that matches one of them has no value,
                   even if a shorter pattern in `values` matches it too
        permitted  names and patterns that the table may contain; None: all
        """
        name_filter = None if permitted is None else NameFilter(permitted)
        super().__init__(
            (name, value)
            for name, value in values.items()
            if not is_pattern(name) and (name_filter is None or name_filter.permits(name))
        )
        self._filter = name_filter
        self._reserved = frozenset(name for name in others if not is_pattern(name))
        entries = [(name, values.get(name)) for name in {*values, *others} if is_pattern(name)]
        patterns = [(parse_pattern(name), value) for name, value in entries]
        self._patterns = sorted(patterns, key=lambda entry: entry[0].rank, reverse=True)

    def __missing__(self, name: str) -> T:
        is_permitted = self._filter is None or self._filter.permits(name)
        if is_permitted and name not in self._reserved:
            value = next((value for key, value in self._patterns if key.matches(name)), None)
            if value is not None:
                return value
        raise KeyError(name)


def find(table: Mapping[str, T], name: str) -> T | None:
    """Return the value for a model name, by exact name or pattern; None if there is no value."""
    try:
        return table[name]
    except KeyError:
        return None
