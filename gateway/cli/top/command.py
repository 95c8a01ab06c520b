"""The command `penstock top`: print the live view once, as JSON, or continuously.

Exit codes: 0 success, 1 no gateway responds, 2 wrong usage.
"""

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

PIPE_WIDTH = 132
NO_KEYS = Text(
    f"To drain, explain and filter with keys: {sys.executable} -m pip install textual", "dim"
)


@with_admin_options
def top(
    admin: AdminAddress,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and exit.")] = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Show the fleet live in this terminal: endpoints, latencies, KV flow and problems.

    The keys are shown at the bottom.
    """
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
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _follow(server: Server) -> None:
    console = _console()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for frame in server.stream("/live/stream"):
                live.update(Group(board(frame), NO_KEYS), refresh=True)
        say("the gateway has closed the stream")
    except NoAnswerError as error:
        fail(str(error))
    except KeyboardInterrupt:
        say(NO_KEYS.plain)
