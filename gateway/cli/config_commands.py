"""The commands reload, diff, rollback and history: changes of a running gateway's configuration.

Each of them sends requests to the admin server and prints the result. Exit codes: 0 success, 1
rejected or not reachable, 2 wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from command_line import Argument, Option, styled, write_line
from gateway.cli.admin_client import AdminAddress, AdminClient, KeyFileOption, with_admin_options
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import exit_with_error, print_json, print_line, sanitize

ForceOption = Annotated[
    bool,
    Option(
        "--force",
        help="Apply the configuration even if some pool has no endpoint that can be reached, or no "
        "endpoint lists a model that is served now.",
    ),
]


@with_admin_options
def reload(
    admin: AdminAddress,
    force: ForceOption = False,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a running gateway reload its configuration file now.

    Unless reload.watch is false, the gateway also reloads the file whenever it changes.
    """
    _print_outcome(
        AdminClient(admin, key_file).request("POST", f"/config/reload?force={force:d}"),
        as_json=as_json,
    )


@with_admin_options
def diff(
    admin: AdminAddress,
    file: Annotated[
        Path | None,
        Argument(
            help="Configuration file to compare with the running one; default: the "
            "gateway's own file."
        ),
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a configuration file would change in a running gateway, without applying it.

    If nothing would change, show the most recent change.
    """
    server = AdminClient(admin, key_file)
    if file is None:
        reply = server.request("POST", "/config/reload?dry_run=1")
    else:
        reply = server.request("PUT", "/config?dry_run=1", _read_file(file))
        for problem in reply.get("problems", ()):
            problem["text"] = f"{file}{problem['text'][len(problem['file']) :]}"
    if reply["result"] == "unchanged":
        versions = server.request("GET", "/config/versions")["versions"]
        reply |= {"last": versions[0]} if versions else {}
    if as_json:
        print_json(reply)
        raise SystemExit(0 if reply["result"] in ("dry_run", "unchanged") else 1)
    if reply["result"] == "unchanged":
        name = str(file) if file is not None else "the file"
        print_line(f"{name} matches the running configuration, v{reply['version']}")
        _print_last_change(reply.get("last"))
        return
    _exit_if_rejected(reply)
    _print_changes(reply["changes"])
    if reply["needs_restart"]:
        print_line(
            f"would take effect after a restart: {', '.join(reply['needs_restart'])}",
            style="yellow",
        )


@with_admin_options
def rollback(
    admin: AdminAddress,
    version: Annotated[
        int | None,
        Argument(
            min=1,
            help="Number of the configuration version to return to; default: the previous one.",
        ),
    ] = None,
    force: ForceOption = False,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Return a running gateway to an earlier configuration version.

    The configuration file stays unchanged; it is applied again when it is next edited.
    """
    path = f"/config/rollback?force={force:d}" + ("" if version is None else f"&to={version}")
    _print_outcome(AdminClient(admin, key_file).request("POST", path), as_json=as_json)


@with_admin_options
def history(admin: AdminAddress, as_json: JsonOption = False) -> None:
    """List the configuration versions that have been applied, newest first."""
    reply = AdminClient(admin, None).request("GET", "/config/versions")
    if as_json:
        print_json(reply)
        return
    for version in reply["versions"]:
        mark = "*" if version["version"] == reply["applied"] else " "
        number, file = f"{mark} v{version['version']}", Path(version["file"]).name
        print_line("  ".join((number, version["at"], version["source"], version["hash"], file)))
        if version.get("reason"):
            print_line(f"      because {version['reason']}")
        _print_changes(version["changes"], indent="      ")


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        exit_with_error(f"cannot read {file}: {error.strerror}")


def _print_outcome(reply: dict[str, Any], *, as_json: bool) -> None:
    # Print the result of a configuration change; exit with status 1 if it was not applied.
    is_success = reply["result"] in ("applied", "unchanged")
    if as_json:
        print_json(reply)
        raise SystemExit(0 if is_success else 1)
    _exit_if_rejected(reply)
    if not is_success:
        exit_with_error(reply["message"])
    print_line(reply["message"], style="green")
    _print_changes(reply["changes"])


def _exit_if_rejected(reply: dict[str, Any]) -> None:
    if reply["result"] not in ("rejected", "nothing"):
        return
    for problem in reply["problems"]:
        print_line(problem["text"], err=True)
    count = len(reply["problems"])
    exit_with_error(f"{count} problem{'s' if count > 1 else ''}" if count else reply["message"])


def _print_last_change(version: dict[str, Any] | None) -> None:
    if version is not None and version["changes"]:
        print_line(f"v{version['version']} changed ({version['source']}, {version['at']}):")
        if version.get("reason"):
            print_line(f"  because {version['reason']}")
        _print_changes(version["changes"])


def _print_changes(changes: list[dict[str, Any]], indent: str = "  ") -> None:
    for change in changes:
        before, after = change["before"], change["after"]
        if before is None:
            text = _styled(f"added {after}", "green")
        elif after is None:
            text = _styled(f"removed {before}", "red")
        elif before == after:
            text = _styled(f"{after} (its value changed)", "yellow")
        else:
            text = f"{_styled(before, 'red')} -> {_styled(after, 'green')}"
        write_line(f"{indent}{sanitize(change['path'])}: {text}")


def _styled(text: str, style: str) -> str:
    return styled(sanitize(text), style, sys.stdout)
