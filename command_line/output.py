"""Output of command-line programs: flushed lines, coloured text and aligned tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TextIO

_CODES = MappingProxyType({"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36})
_GAP = "  "


def write_line(text: str, *, err: bool = False) -> None:
    """Write a line to stdout, or to stderr if `err` is true.

    The stream is flushed, so a program that reads it through a pipe gets the line at once.
    """
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return the text with ANSI escape codes for a style such as "bold red".

    Returns the text unchanged if the style is empty or the stream is not a terminal. The
    environment variables NO_COLOR and TERM=dumb also disable styles.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if not style or is_plain or not stream.isatty():
        return text
    codes = ";".join(str(_CODES[word]) for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m"


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: first the column heads, then the rows.

    The first column is left-aligned, the others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for first, *others in (heads, *rows):
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield _GAP.join(cells).rstrip()
