"""The commands status, reload, diff, rollback and history, which act on a running gateway.

Each one sends requests to the admin server and prints the result. Exit codes: 0 success, 1 rejected
or not reachable, 2 wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from command_line import Argument, Option, styled, write_line
from gateway.cli.admin_client import AdminAddress, AdminClient, KeyFileOption, with_admin_options
from gateway.cli.output import JsonOption, exit_with_error, print_json, print_line, sanitize

# Members of the reply to GET /config that `penstock status --json` prints.
_STATUS_MEMBERS = (
    *("version", "applied", "file_differs", "last_error", "needs_restart"),
    *("models", "shared", "certificates", "unlisted"),
)

ForceOption = Annotated[
    bool,
    Option(
        "--force",
        help="Apply the configuration even if some pool has no endpoint that can be reached.",
    ),
]


@with_admin_options
def status(admin: AdminAddress, as_json: JsonOption = False) -> None:
    """Show a running gateway's configuration version, its last error, and its endpoints."""
    server = AdminClient(admin, None)
    config = server.request("GET", "/config")
    fleet = server.request("GET", "/endpoints")["endpoints"]
    shadows = server.request("GET", "/shadow")["shadows"]
    canaries = server.request("GET", "/canary")["canaries"]
    drift = server.request("GET", "/drift")["pools"]
    if as_json:
        reply = {key: config[key] for key in _STATUS_MEMBERS}
        trials = {"shadows": shadows, "canaries": canaries, "drift": drift}
        print_json(reply | {"endpoints": fleet} | trials)
        return
    _print_version(config["applied"], fleet)
    _print_shared(config["shared"])
    _print_problems(config)
    _print_trials(shadows, canaries)
    _print_drift(drift)


def _print_version(applied: dict[str, Any], fleet: list[dict[str, Any]]) -> None:
    up = sum(row["available"] for row in fleet)
    origin = f"{applied['source']}, {applied['at']}, {applied['hash']}"
    print_line(f"v{applied['version']} {applied['file']} ({origin})")
    in_flight = sum(row["in_flight"] for row in fleet)
    print_line(f"{up} of {len(fleet)} endpoints available, {in_flight} requests in flight")


def _print_problems(config: dict[str, Any]) -> None:
    # Print what an operator may have to act on, one line each; nothing if all is well.
    if config["file_differs"]:
        print_line(
            "the file differs from the running configuration; "
            "`penstock diff` shows the changes, `penstock reload` applies them",
            style="yellow",
        )
    if config["needs_restart"]:
        print_line(
            f"takes effect after a restart: {', '.join(config['needs_restart'])}", style="yellow"
        )
    for row in config["certificates"]:
        if row["problem"] is not None:
            print_line(f"{row['path']}: {row['file']} {row['problem']}", style="red")
    for name, message in config["unlisted"].items():
        print_line(f"requests for model {name} get 404: {message}", style="red")
    error = config["last_error"]
    for problem in error["problems"] if error else ():
        print_line(
            f"last reload rejected ({error['source']}, {error['at']}): {problem['text']}",
            style="red",
        )


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
            help="Configuration file to compare with the one in force; default: the "
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


def _print_shared(shared: dict[str, Any] | None) -> None:
    if shared is None:
        return
    if shared["problem"]:
        print_line(
            f"Redis is not usable: {shared['problem']}; this gateway runs without shared state",
            style="red",
        )
    elif shared["connected"]:
        print_line(f"shares state with {shared['gateways']} other gateways through Redis")


def _print_trials(shadows: list[dict[str, Any]], canaries: list[dict[str, Any]]) -> None:
    for pool in shadows:
        for trial in pool["policies"]:
            line = f"shadow {trial['policy']} of pool {pool['pool']}: "
            line += f"{pool['scored']} of {pool['picks']} picks scored"
            if not trial.get("conclusive"):
                compared = trial.get("agreed", 0) + trial.get("differed", 0)
                line += f"; {compared} compared, too few to judge"
            elif trial.get("agreement") is not None:
                line += f", agrees with {trial['agreement']:.1%}, would gain "
                line += f"{1e3 * trial['ttft_gain_s']:+.1f} ms to the first token and "
                line += f"{trial['cached_tokens_gain']:+.0f} cached tokens, "
                line += f"takes {trial['cost_us']:.0f} us"
            print_line(f"{line}, {trial['failed']} failed" if trial.get("failed") else line)
    for pool in canaries:
        for trial in pool["arms"]:
            line = f"{trial['arm']} {trial['policy']} of pool {pool['pool']}: "
            line += f"{trial['requests']} requests"
            if trial.get("goodput") is not None:
                line += (
                    f", {trial['goodput']:.1%} goodput, "
                    f"{trial['failed']} failed, {trial['shed']} rejected"
                )
            if trial.get("ttft_p50_s") is not None:
                line += f", TTFT p50 {trial['ttft_p50_s']:g} s"
            if trial.get("ttft_p99_s") is not None:
                line += f", p99 {trial['ttft_p99_s']:g} s"
            print_line(f"{line} (canary: {pool['share']})")


def _print_drift(pools: list[dict[str, Any]]) -> None:
    for row in pools:
        window = row["window"]
        if window is None:
            text = "no window of 100 requests has ended yet"
        else:
            text = ", ".join(f"{name} {index:.2f}" for name, index in window["index"].items())
            text += f" (PSI against sized_for, {window['requests']} requests"
            ratio = window["rate_ratio"]
            text += ")" if ratio is None else f", {ratio:.0%} of the usual rate)"
        verdict = f"since {row['since']}" if row["drift"] else "none"
        style = "yellow" if row["drift"] else ""
        print_line(f"drift of pool {row['pool']}: {verdict}; {text}", style=style)


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
