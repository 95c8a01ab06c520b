"""Commands that talk to a running gateway's admin server: status, reload, diff, rollback, history.

Lives here: asking, and printing what came back. Exit codes: 0 done, 1 refused, rejected or not reached, 2 wrong usage.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.text import Text

from gateway.commands import HERE, Admin, Json, fail, print_json, say

WAIT_S = 30.0
ANSWER_CAP_BYTES = 64 << 20
KEY_CAP_BYTES = 64 << 10

KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="File with the admin key; or set PENSTOCK_ADMIN_KEY. Reading needs none."),
]

Force = Annotated[bool, typer.Option("--force", help="Also if no endpoint of a pool can be reached.")]


def status(admin: Admin = HERE, as_json: Json = False) -> None:
    """What a running gateway serves by: version, source, last error, endpoints."""
    server = Server(admin, None)
    config, fleet = server.ask("GET", "/config"), server.ask("GET", "/endpoints")["endpoints"]
    shadows, canaries = server.ask("GET", "/shadow")["shadows"], server.ask("GET", "/canary")["canaries"]
    if as_json:
        told = {
            key: config[key]
            for key in ("version", "applied", "file_differs", "last_error", "needs_restart", "models", "shared")
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
    for problem in error["problems"] if error else ():
        say(f"last attempt rejected ({error['source']}, {error['at']}): {problem['text']}", style="red")
    _tried(shadows, canaries)


def reload(force: Force = False, admin: Admin = HERE, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Reload the configuration file now. The gateway also follows the file unless reload.watch is false."""
    _show(Server(admin, key_file).ask("POST", f"/config/reload?force={force:d}"), as_json=as_json)


def diff(
    file: Annotated[Path | None, typer.Argument(help="File to compare; the gateway's own unless given.")] = None,
    admin: Admin = HERE,
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


def rollback(
    version: Annotated[int | None, typer.Argument(min=1, help="Its number; the one before unless given.")] = None,
    force: Force = False,
    admin: Admin = HERE,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Have a running gateway go back to an older version. Its file stays as it is, and wins again when it is edited."""
    path = f"/config/rollback?force={force:d}" + ("" if version is None else f"&to={version}")
    _show(Server(admin, key_file).ask("POST", path), as_json=as_json)


def history(admin: Admin = HERE, as_json: Json = False) -> None:
    """The versions that were in force, newest first."""
    told = Server(admin, None).ask("GET", "/config/versions")
    if as_json:
        print_json(told)
        return
    for each in told["versions"]:
        mark = "*" if each["version"] == told["applied"] else " "
        say(f"{mark} v{each['version']}  {each['at']}  {each['source']}  {each['hash']}  {Path(each['file']).name}")
        _changes(each["changes"], indent="      ")


class NoAnswerError(Exception):
    """The admin server did not answer, or refused; the message is a sentence for its operator."""


class Server:
    """An admin server, asked one thing at a time: ask() for commands, which end when it fails, try_ask() for others."""

    def __init__(self, url: str, key_file: Path | None) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
            self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            self._host.encode("idna")
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https"):
            raise typer.BadParameter(f"{url!r} is no URL of an admin server; write {HERE}", param_hint="--admin")
        self._url, self._tls = url, parts.scheme == "https"
        self._key = _key(key_file)

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=WAIT_S)

    def stream(self, path: str) -> Iterator[Any]:
        """The JSON of each event of a stream, until it ends or breaks off. Raises NoAnswerError if there is none."""
        connection = self._connection()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != 200:
                why = answer.read(ANSWER_CAP_BYTES).decode(errors="replace").strip()
                raise NoAnswerError(f"{self._url} streams nothing now: {why}")
            while line := answer.readline(ANSWER_CAP_BYTES):
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        except (OSError, http.client.HTTPException, ValueError):
            return
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        """The JSON of the answer, whatever its status. Ends the command with a sentence when there is none."""
        try:
            return self.try_ask(method, path, body)
        except NoAnswerError as error:
            fail(str(error))

    def try_ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        """The JSON of the answer, whatever its status. Raises NoAnswerError."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connection = self._connection()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            told = json.loads(answer.read(ANSWER_CAP_BYTES))
        except (OSError, http.client.HTTPException) as error:
            hint = "is it running, and is --admin its admin server?"
            raise NoAnswerError(f"no gateway answers at {self._url}: {error}; {hint}") from error
        except ValueError:
            told = None
        finally:
            connection.close()
        if not isinstance(told, dict) or (answer.status >= 400 and "message" not in told):
            raise NoAnswerError(f"what answers at {self._url} is no admin server of a gateway (status {answer.status})")
        if told.get("result") == "refused":
            raise NoAnswerError(str(told["message"]))
        return told


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


def _key(file: Path | None) -> str:
    """The admin key, or nothing. Ends the command when it could not be sent."""
    if file is None:
        key = os.environ.get("PENSTOCK_ADMIN_KEY", "")
    else:
        try:
            with file.open("rb") as handle:
                key = handle.read(KEY_CAP_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            fail(f"{file} cannot be read: {error}")
    if key and not (key.isascii() and key.isprintable()):
        fail(f"the key in {file or 'PENSTOCK_ADMIN_KEY'} cannot be sent in a header: it is not printable ASCII")
    return key


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
