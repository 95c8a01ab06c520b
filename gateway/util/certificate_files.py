"""Reads certificate and key files, checks their contents, and detects that a file was replaced.

The configuration and the command line use the checks. Listeners and clients of engines detect
changes. Nothing here opens a connection.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

import msgspec

MAX_FILE_BYTES = 1 << 20
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name


class KeyPair(msgspec.Struct, frozen=True):
    """The paths of a certificate chain and of its private key, both in PEM format."""

    certificate: str
    key: str
    password: str | None = None

    def __repr__(self) -> str:
        return f"KeyPair({self.certificate}, {self.key})"


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
        """Return why peers refuse the certificate at time `now`; None if it is valid then."""
        if self.not_after < now:
            return f"expired on {_date(self.not_after)}; its peers refuse it"
        if self.not_before > now:
            return f"is not valid before {_date(self.not_before)}; its peers refuse it"
        return None


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
    """Return the problem with a file of certificate authorities; None if the file can be used."""
    problem = _unreadable("ca", path)
    if problem is None and not _has_certificate(path):
        problem = FileProblem("ca", "holds no certificate in PEM form")
    return problem


def certificate_validity(pair: KeyPair) -> CertificateValidity:
    """Return a certificate's validity period and names.

    The ssl module cannot parse a certificate file. Therefore this performs a handshake in memory,
    which also proves that the key belongs to the certificate. Raises OSError or ValueError if the
    two files cannot be used.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(server, pair)
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


def file_stamp(path: str) -> tuple[int, ...] | None:
    """Return a value that changes whenever the file, or a link to it, changes; None: no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Load a certificate chain and its key into an SSLContext.

    Raises OSError if the files cannot be used.
    """
    password = pair.password or ""  # without a password OpenSSL would prompt on the terminal
    context.load_cert_chain(pair.certificate, pair.key, lambda: password)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


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
    raise ssl.SSLError(
        "the certificate and its key cannot be used: a TLS handshake in memory with them did "
        "not complete"
    )
