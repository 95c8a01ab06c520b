"""Tests of comparing real engines' answers: equal tokens, and log probabilities to 4 digits."""

from __future__ import annotations

import pytest

from tests.real.engine_requests import Answer, differences


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
