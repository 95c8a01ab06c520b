"""Prints to the terminal: plain lines without escape sequences, JSON, and errors."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from command_line import styled, write_line


def exit_with_error(message: str) -> NoReturn:
    """Print an error message in red on stderr, and exit with status 1."""
    print_line(message, style="red", err=True)
    raise SystemExit(1)


def sanitize(text: str) -> str:
    """Return `text` with every unprintable character except newlines escaped.

    Text from an engine or a client could otherwise send escape sequences to the terminal.
    """
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in text
    )


def print_line(text: str, *, style: str | None = None, err: bool = False) -> None:
    """Print one line of plain text. `style` applies only on a terminal, and not with NO_COLOR."""
    stream = sys.stderr if err else sys.stdout
    write_line(styled(sanitize(text), style or "", stream), err=err)


def is_utf8_output() -> bool:
    """Return whether stdout can encode every character, as UTF-8 can."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")


def print_json(value: object) -> None:
    """Print the value as indented JSON. If stdout cannot encode all characters, escape them."""
    write_line(json.dumps(value, indent=2, ensure_ascii=not is_utf8_output()))
