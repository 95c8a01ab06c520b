"""Commands that talk to a running gateway's admin server: status, reload, diff, rollback, history.

Lives here: asking, and printing what came back. Exit codes: 0 done, 1 refused, rejected or not reached, 2 wrong usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from gateway.cli.admin_client import AdminAddress, KeyFile, Server, with_admin_options
from gateway.cli.output import Json, fail, print_json, say

Force = Annotated[bool, typer.Option("--force", help="Also if no endpoint of a pool can be reached.")]


@with_admin_options
def status(admin: AdminAddress, as_json: Json = False) -> None:
    """What a running gateway serves by: version, source, last error, endpoints."""
    server = Server(admin, None)
    config, fleet = server.ask("GET", "/config"), server.ask("GET", "/endpoints")["endpoints"]
    shadows, canaries = server.ask("GET", "/shadow")["shadows"], server.ask("GET", "/canary")["canaries"]
    if as_json:
        told = {
            key: config[key]
            for key in (
                *("version", "applied", "file_differs", "last_error", "needs_restart", "models", "shared"),
                *("certificates", "unlisted"),
            )
        }
        print_json(told | {"endpoints": fleet, "shadows": shadows, "canaries": canaries})
        return
    applied, error = config["applied"], config["last_error"]
    up = sum(each["available"] for each in fleet)
    say(f"v{applied['version']} {applied['file']} ({applied['source']}, {applied['at']}, {applied['hash']})")
    say(f"{up} of {len(fleet)} endpoints available, {sum(each['in_flight'] for each in fleet)} requests in flight")
    _print_shared(config["shared"])
    if config["file_differs"]:
        text = "the file says something else than what is running; `penstock diff` shows it, `penstock reload` takes it"
        say(text, style="yellow")
    if config["needs_restart"]:
        say(f"needs a restart: {', '.join(config['needs_restart'])}", style="yellow")
    for each in config["certificates"]:
        if each["problem"] is not None:
            say(f"{each['path']}: {each['file']} {each['problem']}", style="red")
    for name, message in config["unlisted"].items():
        say(f"requests for model {name} get 404: {message}", style="red")
    for problem in error["problems"] if error else ():
        say(f"last attempt rejected ({error['source']}, {error['at']}): {problem['text']}", style="red")
    _tried(shadows, canaries)


@with_admin_options
def reload(admin: AdminAddress, force: Force = False, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Reload the configuration file now. The gateway also follows the file unless reload.watch is false."""
    _show(Server(admin, key_file).ask("POST", f"/config/reload?force={force:d}"), as_json=as_json)


@with_admin_options
def diff(
    admin: AdminAddress,
    file: Annotated[Path | None, typer.Argument(help="File to compare; the gateway's own unless given.")] = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """What a file would change of what is running; nothing is taken over. Alike: what the last change was."""
    server = Server(admin, key_file)
    if file is None:
        told = server.ask("POST", "/config/reload?dry_run=1")
    else:
        told = server.ask("PUT", "/config?dry_run=1", _text(file))
        for problem in told.get("problems", ()):
            problem["text"] = f"{file}{problem['text'][len(problem['file']) :]}"
    if told["result"] == "unchanged":
        versions = server.ask("GET", "/config/versions")["versions"]
        told |= {"last": versions[0]} if versions else {}
    if as_json:
        print_json(told)
        raise typer.Exit(0 if told["result"] in ("dry_run", "unchanged") else 1)
    if told["result"] == "unchanged":
        name = str(file) if file is not None else "the file"
        say(f"{name} says what is in force: v{told['version']}")
        _last_change(told.get("last"))
        return
    _problems(told)
    _changes(told["changes"])
    if told["needs_restart"]:
        say(f"would need a restart: {', '.join(told['needs_restart'])}", style="yellow")


@with_admin_options
def rollback(
    admin: AdminAddress,
    version: Annotated[int | None, typer.Argument(min=1, help="Its number; the one before unless given.")] = None,
    force: Force = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Have a running gateway go back to an older version. Its file stays as it is, and wins again when it is edited."""
    path = f"/config/rollback?force={force:d}" + ("" if version is None else f"&to={version}")
    _show(Server(admin, key_file).ask("POST", path), as_json=as_json)


@with_admin_options
def history(admin: AdminAddress, as_json: Json = False) -> None:
    """The versions that were in force, newest first."""
    told = Server(admin, None).ask("GET", "/config/versions")
    if as_json:
        print_json(told)
        return
    for each in told["versions"]:
        mark = "*" if each["version"] == told["applied"] else " "
        say(f"{mark} v{each['version']}  {each['at']}  {each['source']}  {each['hash']}  {Path(each['file']).name}")
        _changes(each["changes"], indent="      ")


def _print_shared(shared: dict[str, Any] | None) -> None:
    """Whether other gateways are reached through Redis."""
    if shared is None:
        return
    if shared["problem"]:
        say(f"Redis is not usable: {shared['problem']}; this gateway goes on alone", style="red")
    elif shared["connected"]:
        say(f"shares its view with {shared['gateways']} other gateways through Redis")


def _tried(shadows: list[dict[str, Any]], canaries: list[dict[str, Any]]) -> None:
    """What policies on trial came to so far."""
    for pool in shadows:
        for each in pool["policies"]:
            told = f"shadow {each['policy']} of pool {pool['pool']}: {pool['scored']} of {pool['picks']} picks scored"
            if not each.get("conclusive"):
                compared = each.get("agreed", 0) + each.get("differed", 0)
                told += f"; {compared} compared, too few to judge"
            elif each.get("agreement") is not None:
                told += f", agrees with {each['agreement']:.1%}, would gain "
                told += f"{1e3 * each['ttft_gain_s']:+.1f} ms to the first token and "
                told += f"{each['cached_tokens_gain']:+.0f} cached tokens, takes {each['cost_us']:.0f} us"
            say(f"{told}, {each['failed']} failed" if each.get("failed") else told)
    for pool in canaries:
        for each in pool["sides"]:
            told = f"{each['side']} {each['policy']} of pool {pool['pool']}: {each['requests']} requests"
            if each.get("goodput") is not None:
                told += f", {each['goodput']:.1%} good, {each['failed']} failed, {each['shed']} shed"
            if each.get("ttft_p50_s") is not None:
                told += f", TTFT p50 {each['ttft_p50_s']:g} s"
            if each.get("ttft_p99_s") is not None:
                told += f", p99 {each['ttft_p99_s']:g} s"
            say(f"{told} (canary: {pool['share']})")


def _text(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}")


def _show(told: dict[str, Any], *, as_json: bool) -> None:
    """What came of a change."""
    good = told["result"] in ("applied", "unchanged")
    if as_json:
        print_json(told)
        raise typer.Exit(0 if good else 1)
    _problems(told)
    if not good:
        fail(told["message"])
    say(told["message"], style="green")
    _changes(told["changes"])


def _problems(told: dict[str, Any]) -> None:
    """Ends the command when the text was rejected, with everything that is wrong in it."""
    if told["result"] not in ("rejected", "nothing"):
        return
    for problem in told["problems"]:
        say(problem["text"], err=True)
    count = len(told["problems"])
    fail(f"{count} problem{'s' if count > 1 else ''}" if count else told["message"])


def _last_change(version: dict[str, Any] | None) -> None:
    if version is not None and version["changes"]:
        say(f"v{version['version']} changed ({version['source']}, {version['at']}):")
        _changes(version["changes"])


def _changes(changes: list[dict[str, Any]], indent: str = "  ") -> None:
    """One line each: what was in red, what is in green."""
    for each in changes:
        before, after = each["before"], each["after"]
        line = Text(f"{indent}{each['path']}: ")
        if before is None or after is None:
            line.append(
                f"added {after}" if before is None else f"removed {before}", "green" if before is None else "red"
            )
        elif before == after:
            line.append(f"{after} has another value now", "yellow")
        else:
            line.append(before, "red").append(" -> ").append(after, "green")
        Console(highlight=False).print(line, soft_wrap=True)
