"""The command `penstock top`, which prints the live view once, as JSON, or continuously.

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
    AdminClient,
    AdminServerError,
    KeyFileOption,
    with_admin_options,
)
from gateway.cli.output import JsonOption, exit_with_error, print_json, print_line
from gateway.cli.top.render import render_view

PIPE_WIDTH = 132
NO_KEYS = Text(
    f"To drain, explain and filter with keys: {sys.executable} -m pip install textual", "dim"
)


@with_admin_options
def top(
    admin: AdminAddress,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and exit.")] = False,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all endpoints live in this terminal: states, latencies, KV flow and problems.

    The bottom line lists the keys.
    """
    server = AdminClient(admin, key_file)
    if as_json:
        print_json(server.request("GET", "/live"))
    elif once or not sys.stdout.isatty():
        _console().print(render_view(server.request("GET", "/live")))
    elif find_spec("textual") is not None:
        from gateway.cli.top.tui import TopApp

        TopApp(server).run()
    else:
        _run_live_view(server)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _run_live_view(server: AdminClient) -> None:
    console = _console()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for frame in server.stream("/live/stream"):
                live.update(Group(render_view(frame), NO_KEYS), refresh=True)
        print_line("the gateway has closed the stream")
    except AdminServerError as error:
        exit_with_error(str(error))
    except KeyboardInterrupt:
        print_line(NO_KEYS.plain)
