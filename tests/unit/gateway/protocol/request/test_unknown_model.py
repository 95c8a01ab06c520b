"""Tests the message that a client gets for the name of an unknown model."""

from __future__ import annotations

import pytest

from gateway.protocol.errors import Failure
from gateway.protocol.request.unknown_model import unknown_model


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("demp", "'demp' does not exist. Did you mean 'demo'?"),
        ("zzzzzzzz", "'zzzzzzzz' does not exist."),
        ("a\r\nb\x1b[31m", r"'a\r\nb\x1b[31m...'"),
        ("x" * 1000, f"'{'x' * 64}...'"),
    ],
)
def test_the_name_is_shown_short_and_without_control_characters(asked: str, shown: str) -> None:
    error = unknown_model(asked, ["demo"], {})
    assert (error.failure, error.param) == (Failure.MODEL_NOT_FOUND, "model")
    assert shown in error.message


def test_at_most_three_similar_names_are_suggested() -> None:
    error = unknown_model("demo", [f"demo{number}" for number in range(9)], {})
    assert error.message.count("demo") == 1 + 3


def test_a_model_that_no_endpoint_lists_has_its_own_message() -> None:
    error = unknown_model("demo", ["demo2"], {"demo": "No endpoint lists it."})
    assert (error.failure, error.param) == (Failure.MODEL_NOT_FOUND, "model")
    assert error.message == "No endpoint lists it."
