"""Runs the commands of the seeds' items, and collects the functions that answer the others."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import typer
from typer.testing import CliRunner

from planner.seeds.items import SeedItem
from planner.size.cli import size

Outcome = Mapping[str, object]
ANSWERS: dict[int, list[Callable[[SeedItem], Outcome]]] = {}


def answer(number: int) -> Callable[[Callable[[SeedItem], Outcome]], Callable[[SeedItem], Outcome]]:
    """Register a function that returns the outcome, or a part of it, of one item by name."""

    def register(function: Callable[[SeedItem], Outcome]) -> Callable[[SeedItem], Outcome]:
        ANSWERS.setdefault(number, []).append(function)
        return function

    return register


@cache
def printed(command: str) -> str:
    """Return what `penstock size ...` prints; exit status 3 is a missed promise, no failure."""
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("penstock", "size")
    app = typer.Typer(add_completion=False)
    app.command()(size)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 3), result.stderr
    return result.stdout


@cache
def plain(command: str) -> Any:
    """Return the JSON of `penstock size ... --json`."""
    return json.loads(printed(f"{command} --json"))


def member(command: str, path: str) -> object:
    """Return a member of the JSON: `gates` are those of the first plan, lists of texts are joined."""
    value = plain(command)
    for key in (f"plans.0.{path}" if path.startswith("gates.") else path).split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return "\n".join(value) if isinstance(value, list) else value
