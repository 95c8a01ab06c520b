"""Tests that texts of durations and sizes are parsed exactly, and ambiguous ones are rejected."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.util import durations_and_sizes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("2s", 2.0),
        ("1m30s", 90.0),
        ("0.1s", 0.1),
        ("50us", 0.00005),
        ("1h", 3600.0),
        ("1d2h", 93600.0),
        ("0s", 0.0),
    ],
)
def test_a_duration_is_read_exactly(text: str, seconds: float) -> None:
    assert durations_and_sizes.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "10", "1.5", "-1s", "1 s", "30s1m", "1s1s", "1e3s", "2secs", "٣s", "999d", "1s\n"],
)
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(durations_and_sizes.UnitError):
        durations_and_sizes.parse_duration(text)


def test_a_bare_number_is_rejected_with_both_ways_to_write_it() -> None:
    with pytest.raises(
        durations_and_sizes.UnitError,
        match=r"'800' is not a duration; write 800s, or 800ms \(0\.8s\)",
    ):
        durations_and_sizes.parse_duration("800")
    with pytest.raises(durations_and_sizes.UnitError, match="write 32B, or 32MiB"):
        durations_and_sizes.parse_size("32")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32MiB", 32 << 20),
        ("1.5KiB", 1536),
        ("1KB", 1000),
        ("7B", 7),
        ("1 GiB", 1 << 30),
        ("0B", 0),
    ],
)
def test_a_size_is_read_exactly(text: str, size: int) -> None:
    assert durations_and_sizes.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "10", "-1B", "1mib", "1.5B", "0.3KiB", "9999999TiB", "1KiB\n"]
)
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(durations_and_sizes.UnitError):
        durations_and_sizes.parse_size(text)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_rejected_with_unit_error(text: str) -> None:
    for parse in (durations_and_sizes.parse_duration, durations_and_sizes.parse_size):
        with contextlib.suppress(durations_and_sizes.UnitError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("30sec", "30s"),
        ("5 m", "5m"),
        ("5M", "5m"),
        ("5min", "5m"),
        ("1hour", "1h"),
        ("2.5S", "2.5s"),
    ],
)
def test_a_misspelt_duration_is_rejected_with_the_one_that_was_meant(text: str, meant: str) -> None:
    with pytest.raises(durations_and_sizes.UnitError, match=f"not a duration; write {meant}$"):
        durations_and_sizes.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("32mib", "32MiB"), ("32m", "32MiB"), ("2G", "2GiB"), ("64k", "64KiB"), ("256mb", "256MB")],
)
def test_a_misspelt_size_is_rejected_with_the_one_that_was_meant(text: str, meant: str) -> None:
    with pytest.raises(durations_and_sizes.UnitError, match=f"not a size; write {meant}$"):
        durations_and_sizes.parse_size(text)


def test_no_unit_is_guessed_for_an_unknown_word_or_the_value_of_a_reference() -> None:
    class Substituted(str):
        __slots__ = ()

    for text in ("5fortnights", "12 parsecs", Substituted("5min")):
        with pytest.raises(durations_and_sizes.UnitError, match="write a number with a unit"):
            durations_and_sizes.parse_duration(text)
