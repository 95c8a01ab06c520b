"""Tests of the lookup of model names: exact names win, then the longest pattern."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.model_alias_lookup import NameTable, find
from gateway.util.name_patterns import NameFilter, NamePattern, parse_pattern

TEXTS = st.text("ab", max_size=4)
PATTERNS = st.builds(NamePattern, TEXTS, TEXTS)

TABLE = NameTable(
    {
        "llama": 0,
        "claude-*": 1,
        "claude-haiku-*": 2,
        "*-latest": 3,
        "claude-haiku-4": 4,
        "gpt-*-x": 5,
    }
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama", 0),
        ("claude-", 1),
        ("claude-opus-4-8", 1),
        ("claude-haiku-5", 2),
        ("claude-haiku-4", 4),
        ("claude-haiku-latest", 2),
        ("claude-latest", 1),
        ("gemini-latest", 3),
        ("gpt-4-x", 5),
        ("gpt--x", 5),
        ("gpt-x", None),
        ("Claude-opus", None),
        ("", None),
    ],
)
def test_an_exact_name_wins_and_then_the_longest_pattern(name: str, value: int | None) -> None:
    assert find(TABLE, name) == value


def test_patterns_are_not_listed() -> None:
    assert sorted(TABLE) == ["claude-haiku-4", "llama"]
    assert "claude-opus" not in TABLE


def test_what_has_no_value_is_not_taken_by_a_shorter_pattern() -> None:
    table = NameTable({"claude-*": 1}, {"claude-mine", "claude-haiku-*"})
    assert find(table, "claude-opus") == 1
    assert find(table, "claude-mine") is None
    assert find(table, "claude-haiku-4") is None


def test_a_limited_table_has_the_permitted_names_only() -> None:
    table = NameTable({"llama": 0, "qwen": 1, "claude-*": 2}, (), ("llama", "claude-haiku*"))
    assert sorted(table) == ["llama"]
    assert [find(table, name) for name in ("llama", "qwen", "claude-haiku-4", "claude-opus")] == [
        *(0, None),
        *(2, None),
    ]


def test_a_pattern_has_at_most_one_star() -> None:
    assert str(parse_pattern("gpt-*-mini")) == "gpt-*-mini"
    with pytest.raises(ValueError, match="more than one"):
        parse_pattern("*gpt*")


def test_a_filter_permits_names_and_what_patterns_match() -> None:
    permitted = NameFilter(("llama", "claude-*"))
    assert [permitted.permits(name) for name in ("llama", "claude-x", "llama-2")] == [
        True,
        True,
        False,
    ]


@given(PATTERNS, PATTERNS, st.text("ab", max_size=12))
def test_patterns_that_match_one_name_overlap(
    one: NamePattern, other: NamePattern, name: str
) -> None:
    if one.matches(name) and other.matches(name):
        assert one.overlaps(other)
    assert one.overlaps(other) == other.overlaps(one)


@given(PATTERNS, PATTERNS)
def test_overlapping_patterns_have_a_name_in_common(one: NamePattern, other: NamePattern) -> None:
    if one.overlaps(other):
        name = max(one.prefix, other.prefix, key=len) + max(one.suffix, other.suffix, key=len)
        assert one.matches(name)
        assert other.matches(name)
