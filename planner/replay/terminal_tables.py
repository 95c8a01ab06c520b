"""Lays out tables for the terminal. Columns that do not fit continue in another table.

html_report.py has the figures; cli.py prints the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

KEYS = 2
"""Number of leading columns that every table repeats: policy and load."""

GROUPS = (3, 2, 2, 3, 5)
"""Sizes of the groups of columns that stay together if the width allows it.

The groups are goodput, TTFT, TPOT, cache and balance, and the rest.
"""

_FRAME = 3  # a space on both sides of a cell, and a line
_EDGE = 1


def figure_tables(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[Table]:
    """Yield the result as one table, or as several if its columns exceed the width.

    heads  names of the columns
    rows   the cells of each row
    width  maximum width in characters

    Every table begins with the columns for policy and load.
    """
    widths = [_widest(head, [row[column] for row in rows]) for column, head in enumerate(heads)]
    widths[0] = min(widths[0], width // 2)  # longer names wrap
    width_left = width - _EDGE - sum(widths[column] + _FRAME for column in range(KEYS))
    for places in _blocks([column_width + _FRAME for column_width in widths], width_left):
        columns = [*range(KEYS), *places]
        yield table(
            [heads[column] for column in columns],
            [[row[column] for column in columns] for row in rows],
        )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal, whose columns are right-aligned except for the first.

    The first column wraps; no cell is truncated.
    """
    from rich.table import Table

    result = Table()
    for column, head in enumerate(heads):
        result.add_column(
            _two_lines(head),
            justify="right" if column else "left",
            no_wrap=column > 0,
            overflow="fold",
        )
    for row in rows:
        result.add_row(*row)
    return result


def _blocks(widths: Sequence[int], width_left: int) -> Iterator[list[int]]:
    # Yield the column indices of each table; a group of columns wider than `width_left` is divided.
    block: list[int] = []
    for group in _groups(len(widths)):
        parts = (
            [group]
            if sum(widths[column] for column in group) <= width_left
            else [[column] for column in group]
        )
        for part in parts:
            if block and sum(widths[column] for column in (*block, *part)) > width_left:
                yield block
                block = []
            block += part
    yield block


def _groups(columns: int) -> Iterator[list[int]]:
    start = KEYS
    for count in GROUPS:
        yield [*range(start, start + count)]
        start += count
    assert start == columns, "every column of the figures belongs to a group"


def _two_lines(head: str) -> str:
    return head.replace(" ", "\n", 1)


def _widest(head: str, cells: Sequence[str]) -> int:
    return max(len(line) for line in (*_two_lines(head).split("\n"), *cells))
