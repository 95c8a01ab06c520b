"""The command `penstock top`: once, as JSON, or on and on. Exit codes: 0 done, 1 no gateway answers, 2 wrong usage."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gateway.cli.admin_client import (
    AdminAddress,
    KeyFile,
    NoAnswerError,
    Server,
    with_admin_options,
)
from gateway.cli.output import Json, fail, print_json, say
from gateway.cli.top.render import board

WIDTH_WITHOUT_A_TERMINAL = 132
NO_KEYS = Text(f"For keys (drain, explain, filter): {sys.executable} -m pip install textual", "dim")


@with_admin_options
def top(
    admin: AdminAddress,
    once: Annotated[bool, typer.Option("--once", help="Print it once and leave.")] = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """The fleet in this terminal: who serves, how fast, what flows where, and why. Keys are shown at the bottom."""
    server = Server(admin, key_file)
    if as_json:
        print_json(server.ask("GET", "/live"))
    elif once or not sys.stdout.isatty():
        _console().print(board(server.ask("GET", "/live")))
    elif find_spec("textual") is not None:
        from gateway.cli.top.tui import Top

        Top(server).run()
    else:
        _follow(server)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_A_TERMINAL)


def _follow(server: Server) -> None:
    console = _console()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as shown:
            for frame in server.stream("/live/stream"):
                shown.update(Group(board(frame), NO_KEYS), refresh=True)
        say("the gateway has ended its stream")
    except NoAnswerError as error:
        fail(str(error))
    except KeyboardInterrupt:
        say(NO_KEYS.plain)
