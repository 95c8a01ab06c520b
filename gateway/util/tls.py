"""TLS settings as values, SSLContext objects made from them, and checks of certificate files.

The configuration checks, the listeners and the clients of engines use this module. It reads files
and opens no connection.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

import msgspec

MAX_FILE_BYTES = 1 << 20
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The cipher suites for TLS 1.2: those with forward secrecy and authenticated encryption. TLS 1.3
has no others."""

ALPN = ("http/1.1",)
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
WRITE_BUFFER_BYTES = 64 * 1024
"""Number of unsent bytes at which a writer is paused; the same as without TLS. uvloop would allow
512 KiB."""

_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name


class KeyPair(msgspec.Struct, frozen=True):
    """The paths of a certificate chain and of its private key, both as PEM files."""

    certificate: str
    key: str
    password: str | None = None

    def __repr__(self) -> str:
        return f"KeyPair({self.certificate}, {self.key})"


class ServerSettings(msgspec.Struct, frozen=True):
    """The TLS settings of a listener of the gateway.

    key_pairs           certificates; the first serves clients that ask for an unknown server name
    client_ca           path of the authorities of client certificates; None: none are requested
    is_client_required  whether a client must present a certificate, if there is a `client_ca`
    min_version         lowest TLS version
    ciphers             cipher suites for TLS 1.2, in OpenSSL's syntax
    """

    key_pairs: tuple[KeyPair, ...]
    client_ca: str | None = None
    is_client_required: bool = True
    min_version: str = "1.2"
    ciphers: str = CIPHERS


class ClientSettings(msgspec.Struct, frozen=True):
    """The TLS settings of the gateway as a client.

    ca             path of the certificate authorities; None: the system's
    should_verify  whether the server's certificate is verified; if not, any server is trusted
    """

    ca: str | None = None
    key_pair: KeyPair | None = None
    should_verify: bool = True


class Encryption(msgspec.Struct, frozen=True):
    """The TLS settings of connections to one server.

    `server_name` is the name that the server's certificate must contain; None means the URL's host.
    """

    context: ssl.SSLContext
    server_name: str | None = None


class FileProblem(msgspec.Struct, frozen=True):
    """A problem with a file that TLS settings name.

    role      certificate, key or ca
    is_error  whether the file cannot be used; otherwise the problem is a warning
    """

    role: str
    message: str
    is_error: bool = True


class CertificateValidity(msgspec.Struct, frozen=True):
    """The validity period of a certificate in Unix seconds, and its DNS names."""

    not_before: float
    not_after: float
    names: tuple[str, ...]

    def refusal_reason(self, now: float) -> str | None:
        """Return why peers refuse the certificate at time `now`, or None if it is valid then."""
        if self.not_after < now:
            return f"expired on {_date(self.not_after)}; its peers refuse it"
        if self.not_before > now:
            return f"is not valid before {_date(self.not_before)}; its peers refuse it"
        return None


def server_context(settings: ServerSettings) -> ssl.SSLContext:
    """Create the SSLContext of a listener.

    Raises OSError (or its subclass ssl.SSLError) for an unusable file.
    """
    contexts = [_server_context(settings, pair) for pair in settings.key_pairs]
    default = contexts[0]
    if len(contexts) > 1:
        named: dict[str, ssl.SSLContext] = {}
        for context, pair in zip(contexts, settings.key_pairs, strict=True):
            for name in certificate_validity(pair).names:
                named.setdefault(name.lower(), context)
        default.sni_callback = _SniCallback(named)
    return default


def client_context(settings: ClientSettings) -> ssl.SSLContext:
    """Create the SSLContext of a client. Raises OSError when a file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(ALPN)
    if not settings.should_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif settings.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(settings.ca)
    if settings.key_pair is not None:
        _load_pair(context, settings.key_pair)
    return context


def settings_files(settings: ServerSettings | ClientSettings) -> tuple[str, ...]:
    """Return the paths of all files that the TLS settings name, without duplicates."""
    if isinstance(settings, ServerSettings):
        pairs: Sequence[KeyPair] = settings.key_pairs
        ca = settings.client_ca
    else:
        pairs = () if settings.key_pair is None else (settings.key_pair,)
        ca = settings.ca
    pair_files = [path for pair in pairs for path in (pair.certificate, pair.key)]
    return tuple(dict.fromkeys((*pair_files, *(() if ca is None else (ca,)))))


def files_stamp(settings: ServerSettings | ClientSettings) -> tuple[tuple[int, ...] | None, ...]:
    """Return a value that changes whenever one of the TLS files, or a symbolic link to it,
    changes.
    """
    return tuple(_stamp(path) for path in settings_files(settings))


def key_pair_problems(pair: KeyPair) -> Iterator[FileProblem]:
    """Yield the problems of a certificate file and its key file: at most one for each."""
    unreadable = (_unreadable("certificate", pair.certificate), _unreadable("key", pair.key))
    problems = [problem for problem in unreadable if problem is not None]
    if not problems and not _has_certificate(pair.certificate):
        problems.append(FileProblem("certificate", "holds no certificate in PEM form"))
    if problems:
        yield from problems
        return
    try:
        times = certificate_validity(pair)
    except (OSError, ValueError) as error:
        yield _pair_problem(error)
        return
    doubt = times.refusal_reason(time())
    if doubt is not None:
        yield FileProblem("certificate", doubt, is_error=False)


def ca_problem(path: str) -> FileProblem | None:
    """Return the problem of a file of certificate authorities, or None if the file can be used."""
    problem = _unreadable("ca", path)
    if problem is None and not _has_certificate(path):
        problem = FileProblem("ca", "holds no certificate in PEM form")
    return problem


def has_valid_ciphers(ciphers: str) -> bool:
    """Return whether OpenSSL knows at least one cipher of the list."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(ciphers)
    except ssl.SSLError:
        return False
    return True


def certificate_validity(pair: KeyPair) -> CertificateValidity:
    """Return a certificate's validity period and names.

    The ssl module has no public parser for a file, so this performs a handshake in memory, which
    also proves that the key belongs to the certificate. Raises OSError or ValueError if the pair
    cannot be used.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_pair(server, pair)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME) | ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=_first_certificate(pair.certificate))
    certificate = _handshake(server, client)
    names = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    if not names:
        names = [
            str(value)
            for entry in certificate.get("subject", ())
            for key, value in entry
            if key == "commonName"
        ]
    begin_s = ssl.cert_time_to_seconds(str(certificate["notBefore"]))
    end_s = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    return CertificateValidity(begin_s, end_s, tuple(names))


class _SniCallback:
    __slots__ = ("_contexts",)

    def __init__(self, contexts: dict[str, ssl.SSLContext]) -> None:
        self._contexts = contexts

    def __call__(self, connection: Any, name: str | None, _: ssl.SSLContext) -> None:
        if name is None:
            return
        name = name.lower()
        context = self._contexts.get(name) or self._contexts.get(f"*.{name.partition('.')[2]}")
        if context is not None:
            connection.context = context


def _server_context(settings: ServerSettings, pair: KeyPair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[settings.min_version]
    context.set_ciphers(settings.ciphers)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)
    _load_pair(context, pair)
    if settings.client_ca is not None:
        context.load_verify_locations(settings.client_ca)
        context.verify_mode = (
            ssl.CERT_REQUIRED if settings.is_client_required else ssl.CERT_OPTIONAL
        )
    return context


def _load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    password = pair.password or ""  # without a password OpenSSL would prompt on the terminal
    context.load_cert_chain(pair.certificate, pair.key, lambda: password)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _unreadable(role: str, path: str) -> FileProblem | None:
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            return FileProblem(role, f"{path} is not a regular file")
        with file.open("rb") as opened:
            if len(opened.read(MAX_FILE_BYTES + 1)) > MAX_FILE_BYTES:
                return FileProblem(role, f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    except OSError as error:
        return FileProblem(role, f"{path} cannot be read: {error.strerror}")
    except ValueError:
        return FileProblem(role, "is not a file path")
    return None


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError):
        return False
    return True


def _first_certificate(path: str) -> bytes:
    text = Path(path).read_text("ascii", "replace")
    start = text.index("-----BEGIN CERTIFICATE-----")
    end_mark = "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(text[start : text.index(end_mark, start) + len(end_mark)])


def _pair_problem(error: Exception) -> FileProblem:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return FileProblem("key", "does not belong to the certificate")
    if isinstance(error, ssl.SSLCertVerificationError):
        return FileProblem("certificate", f"cannot serve: {error.verify_message}")
    if isinstance(error, ssl.SSLError) and reason in (
        None,
        "BAD_DECRYPT",
        "NO_START_LINE",
        "PEM_LIB",
    ):
        message = "is not a private key in PEM form, or key_password does not decrypt it"
        return FileProblem("key", message)
    return FileProblem("certificate", f"cannot be used with its key: {reason or error}")


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    # Perform a TLS handshake in memory; return the server's certificate as getpeercert() does.
    #
    # Raises ssl.SSLError.
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    finished: set[ssl.SSLObject] = set()
    for _ in range(8):
        for end in ends:
            try:
                end.do_handshake()
                finished.add(end)
            except ssl.SSLWantReadError:
                continue
        if len(finished) == len(ends):
            return dict(ends[0].getpeercert() or {})
    raise ssl.SSLError("the TLS handshake that checks the certificate did not complete")
