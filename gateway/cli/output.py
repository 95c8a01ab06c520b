"""What all commands have in common: the options that several take, and how they print. Light to import."""

from __future__ import annotations

import json
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

HERE = "http://127.0.0.1:8081"
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(message: str) -> NoReturn:
    """Ends the command."""
    say(message, style="red", err=True)
    raise typer.Exit(1)


def shown(text: str) -> str:
    """As a terminal may be given it: an engine's words could hold escape sequences."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def say(text: str, *, style: str | None = None, err: bool = False) -> None:
    """One plain line, coloured on a terminal unless NO_COLOR is set."""
    Console(stderr=err, highlight=False).print(shown(text), style=style, markup=False, soft_wrap=True)


def all_letters() -> bool:
    """Whether stdout takes every letter."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=not all_letters()))
