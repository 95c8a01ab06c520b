"""Options and output helpers that several commands share; fast to import."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

from command_line import Option, UsageError, styled, write_line

DEFAULT_ADMIN_URL = "http://127.0.0.1:8081"
JsonOption = Annotated[bool, Option("--json", help="Print the result as JSON.")]
POLICY_HELP = "Routing policy: prefix_aware, priced, or any other name in docs/policies.md."
PolicyOption = Annotated[str | None, Option("--policy", help=POLICY_HELP)]
AdminPortOption = Annotated[
    int | None, Option("--admin-port", min=0, max=65535, help="Port of the admin server.")
]
EngineKeyOption = Annotated[
    str | None,
    Option(
        "--engine-key",
        envvar="PENSTOCK_ENGINE_KEY",
        help="API key for the engines of --engine. Prefer the environment variable: other "
        "users of the machine can see command-line options.",
    ),
]


def check_engine_key(config: Path | None, engine_key: str | None) -> None:
    """Raise UsageError if a key for engines is given on the command line together with a
    configuration file.

    The file contains keys of its own. A key in the environment is accepted, because it may be meant
    for other commands.
    """
    is_option = engine_key is not None and engine_key != os.environ.get("PENSTOCK_ENGINE_KEY")
    if config is not None and is_option:
        raise UsageError(
            "with --config, set api_key for the endpoints in the file instead of --engine-key"
        )


def exit_with_error(message: str) -> NoReturn:
    """Print an error message in red on stderr and exit with status 1."""
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
    """Print one line of plain text; `style` applies only on a terminal without NO_COLOR."""
    stream = sys.stderr if err else sys.stdout
    write_line(styled(sanitize(text), style or "", stream), err=err)


def is_utf8_output() -> bool:
    """Return whether stdout can encode every character (a UTF encoding)."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")


def print_json(value: object) -> None:
    """Print the value as indented JSON, ASCII-only if stdout cannot encode more."""
    write_line(json.dumps(value, indent=2, ensure_ascii=not is_utf8_output()))
