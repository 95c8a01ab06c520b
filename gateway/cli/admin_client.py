"""A client of a gateway's admin server: its command-line options, TLS settings, and requests.

All commands that communicate with a running gateway use it.
"""

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

from command_line import Option, UsageError
from gateway.cli.shared_options import DEFAULT_ADMIN_URL
from gateway.cli.terminal_output import exit_with_error, print_line
from gateway.util.certificate_files import (
    FileProblem,
    KeyPair,
    ca_problem,
    key_pair_problems,
)
from gateway.util.tls_contexts import ClientSettings, client_context

REQUEST_TIMEOUT_S = 30.0
MAX_RESPONSE_BYTES = 64 << 20
MAX_KEY_BYTES = 64 << 10

KeyFileOption = Annotated[
    Path | None,
    Option(
        "--key-file",
        help="File that contains the admin key, which changes require; the "
        "variable PENSTOCK_ADMIN_KEY can be set instead.",
    ),
]


_LAST_OPTIONS = ("key_file", "as_json")
"""Parameters of commands whose options the help lists after the options of the admin server."""


class AdminAddress(msgspec.Struct, frozen=True):
    """The URL of an admin server, and the TLS files for an https:// URL.

    If `is_insecure` is True, any certificate is accepted.
    """

    url: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    is_insecure: bool = False


def with_admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: replace its parameter `admin` with the options of admin_address().

    The decorated command receives the values of these options as one AdminAddress.
    """
    options = inspect.signature(admin_address, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    own = signature.parameters
    leading = [
        parameter for name, parameter in own.items() if name not in ("admin", *_LAST_OPTIONS)
    ]
    trailing = [own[name] for name in _LAST_OPTIONS if name in own]
    combined = [*leading, *options.values(), *trailing]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in options}
        command(**values, admin=admin_address(**chosen))

    wrapper: Any = run
    wrapper.__signature__ = signature.replace(
        parameters=[parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in combined]
    )
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in combined}
    return run


def admin_address(
    admin: Annotated[
        str,
        Option("--admin", envvar="PENSTOCK_ADMIN", help="URL of the gateway's admin server."),
    ] = DEFAULT_ADMIN_URL,
    ca: Annotated[
        Path | None,
        Option(
            "--ca",
            envvar="PENSTOCK_ADMIN_CA",
            help="File with CA certificates (PEM) to verify an https:// admin server; default: "
            "the system's.",
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        Option(
            "--cert",
            envvar="PENSTOCK_ADMIN_CERT",
            help="File with a client certificate (PEM), needed if the configuration sets "
            "listeners.admin.client_ca.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        Option(
            "--key",
            envvar="PENSTOCK_ADMIN_CERT_KEY",
            help="File with the private key (PEM) of the client certificate (--cert).",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        Option(
            "--insecure",
            envvar="PENSTOCK_ADMIN_INSECURE",
            help="Do not verify the admin server's certificate; use this only for tests or on "
            "one machine.",
        ),
    ] = False,
) -> AdminAddress:
    """Return a command's options about the admin server as one value.

    Raises UsageError if they contradict each other.
    """
    if (cert is None) != (key is None):
        raise UsageError("--cert and --key must be given together")
    if _split(admin).scheme == "http" and (ca is not None or cert is not None or insecure):
        raise UsageError("--admin: --ca, --cert and --insecure require an https:// URL")
    return AdminAddress(admin, ca, cert, key, insecure)


class AdminServerError(Exception):
    """Raised if the admin server does not respond or refuses a request.

    The message is written for the operator.
    """


class AdminClient:
    """An HTTP client of one admin server. Each request uses a new connection.

    If the server's URL has a path, for example behind a reverse proxy, it precedes the path of each
    request. Commands call `request`, which ends the command on failure. Other code calls
    `try_request`.
    """

    def __init__(self, admin: AdminAddress, key_file: Path | None) -> None:
        parts = _split(admin.url)
        self._url = admin.url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._base_path = parts.path.rstrip("/")
        self._context = _context(admin) if parts.scheme == "https" else None
        self._key = _key(key_file)

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=REQUEST_TIMEOUT_S)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=REQUEST_TIMEOUT_S, context=self._context
        )

    def stream(self, path: str) -> Iterator[Any]:
        """Yield the JSON of each event of a server-sent stream, until the stream ends or breaks.

        Raises AdminServerError if the server does not start the stream.
        """
        connection = self._connection()
        try:
            connection.request("GET", self._base_path + path)
            response = connection.getresponse()
            if response.status != 200:
                reason = response.read(MAX_RESPONSE_BYTES).decode(errors="replace").strip()
                raise AdminServerError(
                    f"the gateway at {self._url} cannot start the event stream: {reason}"
                )
            while line := response.readline(MAX_RESPONSE_BYTES):
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        except (OSError, http.client.HTTPException, ValueError):
            return
        finally:
            connection.close()

    def request(self, method: str, path: str, body: bytes | None = None) -> Any:
        """Send a request and return the JSON body of the response, whatever its status.

        If there is no valid response, prints a message and exits with status 1.
        """
        try:
            return self.try_request(method, path, body)
        except AdminServerError as error:
            exit_with_error(str(error))

    def try_request(self, method: str, path: str, body: bytes | None = None) -> Any:
        """Send a request and return the JSON body of the response, whatever its status.

        Raises AdminServerError if there is no valid response, or if the server refused the request.
        """
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connection = self._connection()
        try:
            connection.request(method, self._base_path + path, body, headers)
            response = connection.getresponse()
            reply = json.loads(response.read(MAX_RESPONSE_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise AdminServerError(
                f"cannot reach a gateway at {self._url}: {error}; {self._advice(error)}"
            ) from error
        except ValueError:
            reply = None
        finally:
            connection.close()
        if not isinstance(reply, dict) or (response.status >= 400 and "message" not in reply):
            problem = f"is not the admin server of a gateway (status {response.status})"
            raise AdminServerError(f"{self._url} {problem}")
        if reply.get("result") == "refused":
            raise AdminServerError(str(reply["message"]))
        return reply

    def _advice(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return "give its CA with --ca, or use a host name of its certificate in --admin"
        if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(error):
            return "it requires a client certificate: give --cert and --key"
        if isinstance(error, ssl.SSLError):
            return "does the admin server use TLS? If not, the URL begins with http://"
        if self._context is None and isinstance(
            error, ConnectionResetError | http.client.RemoteDisconnected
        ):
            return "if it uses TLS, the URL begins with https://"
        return "is it running, and is --admin the URL of its admin server?"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        host = ""
    if not host or parts.query or parts.fragment or parts.scheme not in ("http", "https"):
        raise UsageError(f"--admin: {url!r} is not a valid URL; an example is {DEFAULT_ADMIN_URL}")
    return parts


def _context(admin: AdminAddress) -> ssl.SSLContext:
    # Return the SSLContext for requests to an https:// admin server.
    #
    # Prints a message and exits with status 1 when a file cannot be used.
    pair, files = None, {"ca": ("--ca", admin.ca)}
    problems: list[FileProblem] = []
    if admin.certificate is not None and admin.key is not None:
        pair = KeyPair(str(admin.certificate), str(admin.key))
        files |= {"certificate": ("--cert", admin.certificate), "key": ("--key", admin.key)}
        problems += key_pair_problems(pair)
    if admin.ca is not None and (problem := ca_problem(str(admin.ca))) is not None:
        problems.append(problem)
    for problem in problems:
        option, path = files[problem.role]
        if problem.is_error:
            exit_with_error(f"{option} {path}: {problem.message}")
        print_line(f"{option} {path} {problem.message}", style="yellow", err=True)
    return client_context(ClientSettings(_path_text(admin.ca), pair, not admin.is_insecure))


def _path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _key(file: Path | None) -> str:
    # Return the admin key, or "" without one.
    #
    # Prints a message and exits with status 1 when the key cannot be read or sent.
    if file is None:
        key = os.environ.get("PENSTOCK_ADMIN_KEY", "")
    else:
        try:
            with file.open("rb") as handle:
                key = handle.read(MAX_KEY_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            exit_with_error(f"cannot read {file}: {error}")
    if key and not (key.isascii() and key.isprintable()):
        exit_with_error(
            f"the key in {file or 'PENSTOCK_ADMIN_KEY'} cannot be sent in an HTTP header: "
            "it is not printable ASCII"
        )
    return key
