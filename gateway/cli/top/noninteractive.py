"""Prints the live view with the library rich: once, or continuously without keys."""

from __future__ import annotations

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gateway.cli.admin_client import AdminClient, AdminServerError
from gateway.cli.terminal_output import exit_with_error, print_line
from gateway.cli.top.render import View, render_view

PIPE_WIDTH = 132
NO_KEYS = Text(
    f"To drain, explain and filter with keys: {sys.executable} -m pip install textual", "dim"
)


def print_once(view: View) -> None:
    """Print the live view of the gateway once, and return."""
    _console().print(render_view(view))


def show_without_keys(server: AdminClient) -> None:
    """Show the live view until Ctrl-C, or until the gateway closes the stream."""
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


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
