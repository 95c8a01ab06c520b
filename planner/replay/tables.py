"""Tables of a replay for the terminal: figures that do not fit its width go on in a further table.

Contains: the layout of rows and columns in a given width. Not here: the figures (report.py) and where they are printed
(cli.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

KEYS = 2
"""Leading columns that every table repeats: the policy and the load."""

GROUPS = (3, 2, 2, 3, 5)
"""How many columns stay together where the width allows it: goodput, TTFT, TPOT, the cache and balance, the rest."""

_FRAME = 3  # a space at both sides of a cell, and a line
_EDGE = 1


def figure_tables(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """One table where all columns fit `width`; otherwise several, each with the policy and the load."""
    wide = [_widest(head, [row[place] for row in rows]) for place, head in enumerate(heads)]
    wide[0] = min(wide[0], width // 2)  # a longer name is wrapped
    room = width - _EDGE - sum(wide[place] + _FRAME for place in range(KEYS))
    for places in _blocks([each + _FRAME for each in wide], room):
        shown = [*range(KEYS), *places]
        yield table([heads[place] for place in shown], [[row[place] for place in shown] for row in rows])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of text, numbers at the right. The first column wraps, no cell is ever cut."""
    made = Table()
    for place, head in enumerate(heads):
        made.add_column(_two_lines(head), justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def _blocks(wide: Sequence[int], room: int) -> Iterator[list[int]]:
    """The places of each table's own columns. A group wider than the room is divided."""
    block: list[int] = []
    for group in _groups(len(wide)):
        parts = [group] if sum(wide[place] for place in group) <= room else [[place] for place in group]
        for part in parts:
            if block and sum(wide[place] for place in (*block, *part)) > room:
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
