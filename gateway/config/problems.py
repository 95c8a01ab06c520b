"""What is wrong with a configuration and where: Problem, ConfigError, and the words they use.

Not here: the rules themselves (tree.py for one value, checks.py for values that must agree).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path as FilePath

import msgspec

Path = tuple[str | int, ...]
"""Where a value sits: ("pools", "chat", "endpoints", 0, "url")."""


class Mark(msgspec.Struct, frozen=True, order=True):
    """A place in the file, both counted from 1."""

    line: int
    column: int


class Problem(msgspec.Struct, frozen=True):
    """One thing wrong (or, as a warning, doubtful) at one place. `path` is as shown: pools.chat.endpoints[0].url."""

    file: str
    line: int
    col: int
    path: str
    message: str

    def __str__(self) -> str:
        subject = f" {self.path}:" if self.path else ""
        return f"{self.file}:{self.line}:{self.col}{subject} {self.message}"


class ConfigError(Exception):
    """The configuration is refused. `problems` holds everything found, in the order of the file; `references` the
    files it names: a change in one of them may be what mends it."""

    def __init__(self, problems: Iterable[Problem], references: Iterable[FilePath] = ()) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.col, p.path)))
        self.references = tuple(references)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def show_path(path: Path) -> str:
    """`path` as an operator writes it: keys joined by dots, places in a list in brackets."""
    shown = ""
    for part in path:
        if isinstance(part, int):
            shown += f"[{part}]"
        else:
            shown += f".{part}" if shown else part
    return shown


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'; did you mean "x"?' for the nearest of `known`, else the choices when they are few, else nothing."""
    choices = sorted(str(getattr(each, "written", each)) for each in known)  # a reference as it is written
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f'; did you mean "{near[0]}"?'
    return f"; known: {', '.join(choices)}" if 0 < len(choices) <= 16 else ""
