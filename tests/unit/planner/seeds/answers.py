"""Computes what Penstock says about each statement on parallelism that `penstock seeds` lists.

For some statements this runs a command, for the others a function.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from planner.seeds.statements import SeedItem
from planner.size.cli import size
from tests.command_runner import CommandRunner, program

Outcome = Mapping[str, object]
ANSWERS: dict[int, list[Callable[[SeedItem], Outcome]]] = {}


def answer(number: int) -> Callable[[Callable[[SeedItem], Outcome]], Callable[[SeedItem], Outcome]]:
    # Return a decorator that registers a function for statement `number`.
    #
    # The function returns the outcome, or a part of it, by name.
    def register(function: Callable[[SeedItem], Outcome]) -> Callable[[SeedItem], Outcome]:
        ANSWERS.setdefault(number, []).append(function)
        return function

    return register


@cache
def printed(command: str) -> str:
    # Run `penstock size ...` and return its output.
    #
    # Exit status 3, a missed latency budget, is no failure.
    called, name, *arguments = shlex.split(command.replace("size.html", os.devnull))
    assert (called, name) == ("penstock", "size")
    result = CommandRunner().invoke(program(size, read_config=json.loads), arguments)
    assert result.exit_code in (0, 3), result.stderr
    return result.stdout


@cache
def plain(command: str) -> Any:
    return json.loads(printed(f"{command} --json"))


def member(command: str, path: str) -> object:
    # Return one member of the JSON output of a command, by its dotted path.
    #
    # `gates` are those of the first plan. A list of texts is joined with line ends.
    value = plain(command)
    for key in (f"plans.0.{path}" if path.startswith("gates.") else path).split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return "\n".join(value) if isinstance(value, list) else value
