"""The command `penstock top`, which prints the live view once, as JSON, or continuously.

Exit codes: 0 success, 1 no gateway responds, 2 wrong usage.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

from command_line import Option
from gateway.cli.admin_client import (
    AdminAddress,
    AdminClient,
    KeyFileOption,
    with_admin_options,
)
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import exit_with_error, print_json


@with_admin_options
def top(
    admin: AdminAddress,
    once: Annotated[bool, Option("--once", help="Print the live view once and exit.")] = False,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all endpoints live in this terminal: states, latencies, KV flow and problems.

    The bottom line lists the keys.
    """
    server = AdminClient(admin, key_file)
    if as_json:
        print_json(server.request("GET", "/live"))
    elif find_spec("rich") is None:
        exit_with_error("this needs rich, which is not installed: pip install 'penstock[top]'")
    else:
        _show(server, once=once or not sys.stdout.isatty())


def _show(server: AdminClient, *, once: bool) -> None:
    from gateway.cli.top.noninteractive import print_once, show_without_keys

    if once:
        print_once(server.request("GET", "/live"))
    elif find_spec("textual") is not None:
        from gateway.cli.top.tui import TopApp

        TopApp(server).run()
    else:
        show_without_keys(server)
