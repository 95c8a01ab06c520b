"""Patterns of model names with one `*`, which matches any characters: `claude-*`, `*-latest`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

WILDCARD = "*"


class NamePattern(msgspec.Struct, frozen=True):
    """A pattern that matches names which begin with `prefix` and end with `suffix`.

    The two must not overlap in the name.
    """

    prefix: str
    suffix: str

    def matches(self, name: str) -> bool:
        return (
            name.startswith(self.prefix)
            and name.endswith(self.suffix)
            and len(name) >= len(self.prefix) + len(self.suffix)
        )

    def overlaps(self, other: NamePattern) -> bool:
        prefixes = sorted((self.prefix, other.prefix), key=len)
        suffixes = sorted((self.suffix, other.suffix), key=len)
        return prefixes[1].startswith(prefixes[0]) and suffixes[1].endswith(suffixes[0])

    @property
    def rank(self) -> tuple[int, int, str]:
        """Return a sort key by which patterns take precedence: total length, then prefix length."""
        return len(self.prefix) + len(self.suffix), len(self.prefix), self.prefix

    def __str__(self) -> str:
        return f"{self.prefix}{WILDCARD}{self.suffix}"


def is_pattern(name: str) -> bool:
    return WILDCARD in name


def parse_pattern(text: str) -> NamePattern:
    """Parse a pattern with at most one `*`; without one, it matches only its own text.

    Raises ValueError if the text has several `*`.
    """
    if text.count(WILDCARD) > 1:
        raise ValueError(f"the name pattern {text!r} has more than one {WILDCARD}; use at most one")
    prefix, _, suffix = text.partition(WILDCARD)
    return NamePattern(prefix, suffix)


class NameFilter:
    """The set of model names that a list of names and patterns permits."""

    __slots__ = ("_names", "_patterns")

    def __init__(self, texts: Iterable[str]) -> None:
        self._names = frozenset(text for text in texts if not is_pattern(text))
        self._patterns = tuple(parse_pattern(text) for text in texts if is_pattern(text))

    def permits(self, name: str) -> bool:
        return name in self._names or any(pattern.matches(name) for pattern in self._patterns)
