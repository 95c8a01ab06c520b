"""Writes the output of commands: lines, colours on terminals, and tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TextIO

_CODES = MappingProxyType({"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36})
_GAP = "  "


def write_line(text: str, *, err: bool = False) -> None:
    """Write a line to stdout or stderr and flush it: a program may wait for it at a pipe."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return the text with terminal codes for a style such as "bold red".

    Returns it unchanged if the stream is not a terminal or NO_COLOR is set.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if not style or is_plain or not stream.isatty():
        return text
    codes = ";".join(str(_CODES[word]) for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m"


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, heads first. All columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for first, *others in (heads, *rows):
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield _GAP.join(cells).rstrip()
