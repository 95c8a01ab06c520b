"""The client of a gateway's admin server that commands share: its options, its TLS, and one request at a time."""

from __future__ import annotations

import functools
import http.client
import inspect
import json
import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import typer

from gateway.cli.output import HERE, fail, say
from gateway.util import tls

WAIT_S = 30.0
ANSWER_CAP_BYTES = 64 << 20
KEY_CAP_BYTES = 64 << 10

KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="File with the admin key; or set PENSTOCK_ADMIN_KEY. Reading needs none."),
]


_LAST = ("key_file", "as_json")
"""Parameters whose options help shows after those of the admin server."""


class AdminAddress(msgspec.Struct, frozen=True):
    """Where the admin server is, and the TLS files of an https:// URL. `insecure` accepts any certificate."""

    url: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False


def with_admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of address() in place of its parameter `admin`."""
    options = inspect.signature(address, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    given = signature.parameters
    before = [each for name, each in given.items() if name not in ("admin", *_LAST)]
    after = [given[name] for name in _LAST if name in given]
    own = [*before, *options.values(), *after]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in options}
        command(**values, admin=address(**chosen))

    shown: Any = run
    shown.__signature__ = signature.replace(parameters=[each.replace(kind=each.KEYWORD_ONLY) for each in own])
    shown.__annotations__ = {each.name: each.annotation for each in own}
    return run


def address(
    admin: Annotated[str, typer.Option("--admin", envvar="PENSTOCK_ADMIN", help="URL of the admin server.")] = HERE,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca",
            envvar="PENSTOCK_ADMIN_CA",
            help="Authorities that sign its certificate (PEM), with an https:// URL; the system's unless given.",
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(
            "--cert",
            envvar="PENSTOCK_ADMIN_CERT",
            help="Client certificate (PEM), where listeners.admin has client_ca.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", envvar="PENSTOCK_ADMIN_CERT_KEY", help="Private key of --cert (PEM)."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="PENSTOCK_ADMIN_INSECURE",
            help="Accept any certificate; for tests, or on this machine.",
        ),
    ] = False,
) -> AdminAddress:
    """The options of a command as one value. Raises BadParameter where they contradict each other."""
    if (cert is None) != (key is None):
        raise typer.BadParameter("--cert and --key need each other")
    if _split(admin).scheme == "http" and (ca is not None or cert is not None or insecure):
        raise typer.BadParameter("--ca, --cert and --insecure need an https:// URL", param_hint="--admin")
    return AdminAddress(admin, ca, cert, key, insecure)


class NoAnswerError(Exception):
    """The admin server did not answer, or refused; the message is a sentence for its operator."""


class Server:
    """An admin server, asked one thing at a time: ask() for commands, which end when it fails, try_ask() for others."""

    def __init__(self, admin: AdminAddress, key_file: Path | None) -> None:
        parts = _split(admin.url)
        self._url = admin.url
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._context = _context(admin) if parts.scheme == "https" else None
        self._key = _key(key_file)

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=WAIT_S)
        return http.client.HTTPSConnection(self._host, self._port, timeout=WAIT_S, context=self._context)

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
            raise NoAnswerError(f"no gateway answers at {self._url}: {error}; {self._advice(error)}") from error
        except ValueError:
            told = None
        finally:
            connection.close()
        if not isinstance(told, dict) or (answer.status >= 400 and "message" not in told):
            raise NoAnswerError(f"what answers at {self._url} is no admin server of a gateway (status {answer.status})")
        if told.get("result") == "refused":
            raise NoAnswerError(str(told["message"]))
        return told

    def _advice(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return "name the authority of its certificate with --ca, or a host of the certificate in --admin"
        if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(error):
            return "it wants a client certificate: --cert and --key"
        if isinstance(error, ssl.SSLError):
            return "is it an admin server with TLS? Without it the URL begins with http://"
        if self._context is None and isinstance(error, ConnectionResetError | http.client.RemoteDisconnected):
            return "if it has TLS, the URL begins with https://"
        return "is it running, and is --admin its admin server?"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https"):
        raise typer.BadParameter(f"{url!r} is no URL of an admin server; write {HERE}", param_hint="--admin")
    return parts


def _context(admin: AdminAddress) -> ssl.SSLContext:
    """Ends the command when a file cannot be used."""
    pair, files = None, {"ca": ("--ca", admin.ca)}
    problems: list[tls.FileProblem] = []
    if admin.certificate is not None and admin.key is not None:
        pair = tls.KeyPair(str(admin.certificate), str(admin.key))
        files |= {"certificate": ("--cert", admin.certificate), "key": ("--key", admin.key)}
        problems += tls.pair_problems(pair)
    if admin.ca is not None and (problem := tls.ca_problem(str(admin.ca))) is not None:
        problems.append(problem)
    for problem in problems:
        option, path = files[problem.role]
        if problem.is_error:
            fail(f"{option} {path}: {problem.message}")
        say(f"{option} {path} {problem.message}", style="yellow", err=True)
    return tls.client_context(tls.ClientSettings(_text(admin.ca), pair, not admin.insecure))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


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
