"""Parses the command line of another router into options, and records which of them were used."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from gateway.migrate.config_draft import MigrationError

MAX_WORDS = 100_000
_REDIRECTION = re.compile(r"[0-9]?(?:>>?|<)(.*)")
"""A redirection, whose target is in group 1 or the next word."""


def split_words(text: str) -> list[str]:
    """Split a shell command into words; quotes, comments and continued lines are parsed.

    Raises MigrationError for an unclosed quote.
    """
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        words = list(lexer)
    except ValueError as error:
        raise MigrationError(f"the text is not a valid command line: {error}") from None
    return words[:MAX_WORDS]


def without_redirections(words: Sequence[str]) -> list[str]:
    """Return the words of a shell command without redirections such as `> FILE` and `2>&1`."""
    kept: list[str] = []
    is_target = False
    for word in words:
        redirection = _REDIRECTION.match(word)
        if not is_target and redirection is None:
            kept.append(word)
        is_target = redirection is not None and not redirection[1]
    return kept


class CommandOptions:
    """The options of another router's command line, which also records which of them were read.

    Options that were not converted can then be listed. All words up to the next option are values
    of an option, as in the routers' own parsers.
    """

    def __init__(self, occurrences: Sequence[tuple[str, list[str]]] = ()) -> None:
        self._occurrences = [(name, list(values)) for name, values in occurrences]
        self._read: set[str] = set()

    @classmethod
    def parse(cls, words: Sequence[str], prefix: str = "") -> CommandOptions:
        """Parse the words of a command line, `--name value ...` and `--name=value`.

        `prefix` is removed from option names that begin with it.
        """
        occurrences: list[tuple[str, list[str]]] = []
        for word in words:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word[2:].partition("=")
                name = name.replace("_", "-").removeprefix(prefix)
                occurrences.append((name, [value] if equals else []))
            elif occurrences:
                occurrences[-1][1].append(word)
        return cls(occurrences)

    def __contains__(self, name: str) -> bool:
        return any(name == other for other, _ in self._occurrences)

    def values_by_occurrence(self, name: str) -> list[list[str]]:
        """Return the values of every occurrence of an option, as separate lists."""
        self._read.add(name)
        return [values for other, values in self._occurrences if other == name]

    def values(self, name: str) -> list[str]:
        """Return the values of all occurrences of the option `name`, in order."""
        return [value for values in self.values_by_occurrence(name) for value in values]

    def last(self, name: str) -> str | None:
        """Return the last value of an option; None if it is absent or has no value."""
        values = self.values(name)
        return values[-1] if values else None

    def flag(self, name: str) -> bool:
        """Return whether an option is turned on. `false` and `0` as values turn it off."""
        occurrences = self.values_by_occurrence(name)
        return bool(occurrences) and occurrences[-1] not in (["false"], ["False"], ["0"])

    def unread_names(self) -> Iterator[str]:
        """Yield the names of the given options that no reader has read, without duplicates."""
        names = dict.fromkeys(name for name, _ in self._occurrences)
        yield from (name for name in names if name not in self._read)
