"""Tests that integers are accepted in all the forms that vLLM accepts."""

from __future__ import annotations

import pytest

from gateway.protocol.request.lax_numbers import lax_integer


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (3.0, 3),
        ("3", 3),
        (" 3 ", 3),
        ("3.0", 3),
        ("3.", 3),
        ("+3", 3),
        ("-3", -3),
        (-0.0, 0),
    ],
)
def test_an_integer_may_be_a_whole_float_or_text(value: object, number: int) -> None:
    assert lax_integer(value) == number


@pytest.mark.parametrize(
    "value",
    [
        *(True, False, None, 3.5, float("nan"), float("inf"), "", "three", "3.5", "0x3", "1e3"),
        *("1_000", "٣", "3 3", "9" * 25, [3], {}, ()),
    ],
)
def test_other_values_are_no_integers(value: object) -> None:
    assert lax_integer(value) is None
