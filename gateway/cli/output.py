"""Options and output helpers that several commands share; light to import."""

from __future__ import annotations

import json
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

HERE = "http://127.0.0.1:8081"
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(message: str) -> NoReturn:
    """Print an error message in red on stderr and exit with status 1."""
    say(message, style="red", err=True)
    raise typer.Exit(1)


def shown(text: str) -> str:
    """Escape every unprintable character except newlines.

    Text from an engine or a client could otherwise send escape sequences to the terminal.
    """
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in text
    )


def say(text: str, *, style: str | None = None, err: bool = False) -> None:
    """Print one line of plain text; `style` applies only on a terminal without NO_COLOR."""
    Console(stderr=err, highlight=False).print(
        shown(text), style=style, markup=False, soft_wrap=True
    )


def all_letters() -> bool:
    """Return whether stdout can encode every character (a UTF encoding)."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")


def print_json(value: object) -> None:
    """Print the value as indented JSON, ASCII-only where stdout cannot encode more."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=not all_letters()))
