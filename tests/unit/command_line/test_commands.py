"""Tests of command lines that are made from annotated functions."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest

from command_line import Argument, Option, UsageError, parse_command, run_command, table_lines
from tests.command_runner import CommandRunner, program


class Colour(StrEnum):
    """The values of the test command's option --colour."""

    RED = "red"
    BLUE = "blue"


def _check_even(number: int) -> None:
    if number % 2:
        raise UsageError(f"the value {number} is odd; give an even number")


def paint(
    thing: Annotated[str, Argument(help="What to paint, 100 % of it.")],
    others: Annotated[list[str] | None, Argument(help="Further things to paint.")] = None,
    colour: Annotated[Colour, Option("--colour", "-c", help="Colour of the paint.")] = Colour.RED,
    layers: Annotated[int, Option(min=1, max=9, help="Number of layers of paint.")] = 2,
    hours: Annotated[
        float | None, Option("--hours", min=0, help="Hours that a layer dries.")
    ] = None,
    brush: Annotated[
        list[str] | None, Option("--brush", help="Name of a brush; may be repeated.")
    ] = None,
    is_dry: Annotated[bool, Option("--dry/--wet", help="Whether the paint dries.")] = True,
    is_loud: Annotated[
        bool, Option("--loud", envvar="LOUD", help="Whether the work is loud.")
    ] = False,
    plan: Annotated[
        Path | None, Option(is_file=True, help="File with the plan of the work.")
    ] = None,
    even: Annotated[int | None, Option("--even", check=_check_even, help="An even number.")] = None,
) -> None:
    """Paint one or more things."""
    if colour is Colour.BLUE and layers > 3:
        raise UsageError("--layers must be at most 3 with the colour blue")


def required(
    port: Annotated[int, Option("--port", envvar="PORT", help="Port to listen on.")],
) -> None:
    """Require a port, from the option or the environment."""


def forward(
    words: Annotated[
        list[str],
        Argument(metavar="FILE | -- COMMAND...", help="File to read, or the words of a command."),
    ],
    kind: Annotated[str | None, Option("--from", help="Kind of the source.")] = None,
) -> None:
    """Take a file, or the command line of another program after --."""


def values(*words: str, **environment: str) -> dict[str, Any]:
    return parse_command(paint, words, "paint", environment)


def test_values_without_options_are_the_defaults() -> None:
    assert values("wall") == {
        "thing": "wall",
        "others": None,
        "colour": Colour.RED,
        "layers": 2,
        "hours": None,
        "brush": None,
        "is_dry": True,
        "is_loud": False,
        "plan": None,
        "even": None,
    }


def test_options_stand_before_between_and_after_arguments() -> None:
    given = values("-c", "blue", "wall", "--layers", "3", "door", "--brush", "a", "--brush=b")
    assert (given["thing"], given["others"], given["layers"]) == ("wall", ["door"], 3)
    assert (given["colour"], given["brush"]) == (Colour.BLUE, ["a", "b"])


def test_a_bool_is_turned_off_by_its_other_name() -> None:
    assert values("wall", "--wet")["is_dry"] is False
    assert values("wall", "--dry")["is_dry"] is True


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_the_environment_stands_for_an_option(text: str, value: bool) -> None:
    assert values("wall", LOUD=text)["is_loud"] is value
    assert values("wall", "--loud", LOUD=text)["is_loud"] is True


def test_a_required_option_may_come_from_the_environment_and_is_named_where_it_is_missing() -> None:
    assert parse_command(required, [], "it", {"PORT": "8"}) == {"port": 8}
    with pytest.raises(UsageError, match="the required option --port is missing"):
        parse_command(required, [], "it", {})
    with pytest.raises(UsageError, match="PORT: 'x' is not a whole number"):
        parse_command(required, [], "it", {"PORT": "x"})


def test_words_after_two_dashes_are_arguments() -> None:
    given = parse_command(forward, ["--from", "v", "--", "a", "--b", "--", "-c"], "it", {})
    assert given == {"words": ["a", "--b", "--", "-c"], "kind": "v"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("wall --layers 10", "argument --layers: 10 is too large; the largest value is 9"),
        ("wall --layers 0", "0 is too small; the smallest value is 1"),
        ("wall --layers two", "'two' is not a whole number"),
        ("wall --hours nan", "nan is too small"),
        ("wall --colour green", "'green' is not a valid value; use one of: red, blue"),
        ("wall --plan /nonexistent/file", "the file /nonexistent/file does not exist"),
        ("wall --plan /", "/ is a directory; give the path of a file"),
        ("wall --even 3", "the value 3 is odd"),
        ("wall --colour blue --layers 4", "--layers must be at most 3 with the colour blue"),
        ("wall --lay 3", "unrecognized arguments: --lay"),
        ("", "the following arguments are required: THING"),
    ],
)
def test_wrong_words_end_with_status_2_and_a_reason(words: str, message: str) -> None:
    done = CommandRunner().invoke(program(paint), words.split())
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Try 'penstock --help' for help." in done.stderr


def test_help_names_every_option_with_its_default_and_environment() -> None:
    text = " ".join(CommandRunner().invoke(program(paint), ["--help"]).stdout.split())
    for part in (
        "THING What to paint, 100 % of it.",
        "--colour red|blue, -c red|blue Colour of the paint. [default: red]",
        "--layers INTEGER Number of layers of paint. [default: 2]",
        "--dry Whether the paint dries. [off: --wet] [default: on]",
        "--loud Whether the work is loud. [environment: LOUD]",
    ):
        assert part in text


def test_only_values_that_a_command_takes_are_passed_to_it() -> None:
    taken = []

    def command(folder: Path, name: Annotated[str, Argument(help="Name of the thing.")]) -> None:
        taken.append((folder, name))

    command.__annotations__ = {
        "folder": Path,
        "name": Annotated[str, Argument(help="Name of the thing.")],
    }
    run_command(command, ["x"], "it", {}, folder=Path("/"), unused=1)
    assert taken == [(Path("/"), "x")]


def test_a_table_aligns_numbers_to_the_right() -> None:
    assert list(table_lines(("name", "count"), [("a", "1"), ("longer", "12345678")])) == [
        "name       count",
        "a              1",
        "longer  12345678",
    ]
