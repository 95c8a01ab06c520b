"""Tests of comparing real engines' answers: equal tokens, and log probabilities to 4 digits.

In bfloat16 they may part where the likeliest tokens are tied.
"""

from __future__ import annotations

import pytest

from tests.real.engine_requests import (
    BFLOAT16_TOLERANCE,
    Answer,
    differences,
    differences_until_a_tie,
)


def answer(*tokens: tuple[str, float]) -> Answer:
    return Answer(200, {}, tokens=tokens)


def test_rounding_of_float32_is_no_difference() -> None:
    assert (
        differences(
            answer(("a", -3.0747004), ("b", -0.00001)), answer(("a", -3.0747018), ("b", 0.0))
        )
        == []
    )


@pytest.mark.parametrize(
    "other",
    [
        answer(("a", -3.0757004)),
        answer(("b", -3.0747004)),
        answer(),
        answer(("a", -3.0747004), ("b", -1.0)),
        answer(("a", float("nan"))),
    ],
    ids=["logprob", "token", "none", "longer", "nan"],
)
def test_another_token_length_or_fourth_digit_is_a_difference(other: Answer) -> None:
    assert len(differences(answer(("a", -3.0747004)), other)) == 1


def chosen(*places: dict[str, float]) -> Answer:
    # Return a greedy answer with these choices at each place, the likeliest first.
    return Answer(200, {}, tokens=tuple(next(iter(p.items())) for p in places), choices=places)


def parted(one: Answer, other: Answer) -> list[str]:
    return differences_until_a_tie(one, other, BFLOAT16_TOLERANCE)


A = {"a": -1.0, "b": -3.0}
TIE, OTHER_WAY = {"c": -2.0, "d": -2.05}, {"d": -1.98, "c": -2.03}


def test_answers_in_bfloat16_may_part_at_a_tie() -> None:
    one, other = chosen(A, TIE, {"x": -1.0}), chosen(A | {"a": -1.06}, OTHER_WAY, {"y": -2.0})
    assert parted(one, other) == []
    assert parted(other, one) == []
    assert parted(one, one) == []


@pytest.mark.parametrize(
    "other",
    [
        chosen({"a": -1.2, "b": -3.0}, OTHER_WAY),
        chosen({"b": -1.0, "a": -3.0}, TIE),
        chosen({"e": -1.0}, TIE),
        chosen(A, {"d": -1.0, "c": -2.0}),
        chosen(A, {"d": -2.3, "c": -2.35}),
        chosen(A, {"c": -2.2, "d": -2.3}),
        chosen(A),
    ],
    ids=["logprob", "no tie", "unknown", "likelier", "both less likely", "same token", "shorter"],
)
def test_other_answers_in_bfloat16_differ(other: Answer) -> None:
    assert parted(chosen(A, TIE), other)
    assert parted(other, chosen(A, TIE))
