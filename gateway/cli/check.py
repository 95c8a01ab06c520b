"""The command `penstock check`: prints the problems of a configuration file by line and column."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from command_line import Argument
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import print_json, print_line

if TYPE_CHECKING:
    from gateway.config import ConfigError, Problem


def check(
    file: Annotated[Path, Argument(help="Configuration file (YAML) to check.")],
    as_json: JsonOption = False,
) -> None:
    """Check a configuration file and print every problem with its line and column."""
    from gateway.config import ConfigError, load_with_warnings

    try:
        loaded = load_with_warnings(file, os.environ)
    except ConfigError as error:
        exit_with_problems(error, as_json=as_json)
    config = loaded.config
    specs = [spec for pool in config.pools.values() for spec in pool.endpoints]
    endpoints = len(specs)
    gpus = sum(spec.layout.tp * spec.layout.pp * spec.layout.dp for spec in specs)
    if as_json:
        warnings = [_problem_as_json(problem) for problem in loaded.warnings]
        print_json(
            {
                "ok": True,
                "file": str(file),
                "endpoints": endpoints,
                "gpus": gpus,
                "problems": [],
                "warnings": warnings,
            }
        )
        return
    for problem in loaded.warnings:
        print_line(f"{problem} (warning)", style="yellow", err=True)
    print_line(
        f"{file} is valid: {_count(len(config.models), 'model')}, "
        f"{_count(len(config.pools), 'pool')}, {_count(endpoints, 'endpoint')}, "
        f"{_count(gpus, 'GPU')}",
        style="green",
    )


def exit_with_problems(error: ConfigError, *, as_json: bool) -> NoReturn:
    """Print the problems of a configuration on stderr, or as JSON, and exit with status 1."""
    if as_json:
        print_json(
            {
                "ok": False,
                "problems": [_problem_as_json(problem) for problem in error.problems],
                "warnings": [],
            }
        )
    else:
        for problem in error.problems:
            print_line(str(problem), err=True)
        print_line(_count(len(error.problems), "problem"), style="red", err=True)
    raise SystemExit(1)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _problem_as_json(problem: Problem) -> dict[str, object]:
    return {name: getattr(problem, name) for name in problem.__struct_fields__}
