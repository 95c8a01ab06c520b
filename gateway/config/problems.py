"""Problems (errors and warnings) of a configuration, their positions, and helpers for messages.

The rules that find problems are in root_section.py and the rule modules.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path as FilePath

import msgspec

Path = tuple[str | int, ...]
"""Path of a value, such as ("pools", "chat", "endpoints", 0, "url")."""


class SourcePosition(msgspec.Struct, frozen=True, order=True):
    """A position in the configuration file: line and column, counted from 1."""

    line: int
    column: int


class Problem(msgspec.Struct, frozen=True):
    """An error or warning at one position in the configuration file.

    `path` is in display form: pools.chat.endpoints[0].url.
    """

    file: str
    line: int
    col: int
    path: str
    message: str

    def __str__(self) -> str:
        subject = f" {self.path}:" if self.path else ""
        return f"{self.file}:{self.line}:{self.col}{subject} {self.message}"


class ConfigError(Exception):
    """Raised when a configuration of the gateway is invalid.

    problems    all problems, in the order of the file
    references  the files that the configuration refers to; after a change of one of them, the
                configuration may be valid
    """

    def __init__(self, problems: Iterable[Problem], references: Iterable[FilePath] = ()) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.col, p.path)))
        self.references = tuple(references)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def show_path(path: Path) -> str:
    """Return a path as operators write it, such as pools.chat.endpoints[0].url."""
    shown = ""
    for part in path:
        if isinstance(part, int):
            shown += f"[{part}]"
        else:
            shown += f".{part}" if shown else part
    return shown


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown word, to append to an error message.

    It is '; did you mean "x"?', where x is the word in `known` closest to `word`. If no word is
    close, it is the list of known words, or "" if there are many.
    """
    # A word that came from a reference is shown as the reference is written.
    choices = sorted(str(getattr(each, "written", each)) for each in known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(choices)}" if 0 < len(choices) <= 16 else ""
