"""Tests that the result tables of `penstock replay` fit into the terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from planner.replay.html_report import HEADS
from planner.replay.terminal_tables import figure_tables

NAMES = (
    "round_robin",
    "sglang_cache_aware",
    "a_policy_with_quite_a_long_name_from_another_package",
)
FIGURES = [f"{number}1.{number:02}%" for number in range(len(HEADS) - 2)]


def printed(width: int, names: tuple[str, ...] = NAMES) -> str:
    console = Console(file=io.StringIO(), width=width)
    for figure_table in figure_tables(HEADS, [[name, "0.5", *FIGURES] for name in names], width):
        console.print(figure_table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 132, 220])
def test_every_line_fits_the_width_and_no_figure_is_cut(width: int) -> None:
    lines = printed(width).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for figure in FIGURES:
        assert text.count(f" {figure} ") == len(NAMES)


@pytest.mark.parametrize("width", [80, 220])
def test_every_table_names_policy_and_load_of_its_rows(width: int) -> None:
    text = printed(width, NAMES[:2])
    tables = text.count("policy")
    assert (
        tables
        == text.count("load")
        == text.count("round_robin")
        == text.count("sglang_cache_aware")
    )
    assert (tables == 1) == (width == 220)


def test_a_name_longer_than_half_of_the_width_is_wrapped_and_whole() -> None:
    text = printed(80)
    first = "".join(re.findall(r"^│ ([a-z_]+)", text.split("└")[0], flags=re.M))
    assert first == "".join(NAMES)


def test_columns_that_belong_together_stay_in_one_table() -> None:
    heads = [line for line in printed(80, NAMES[:1]).splitlines() if "policy" in line]
    assert [line.count("p50") for line in heads] == [line.count("p99") for line in heads]
