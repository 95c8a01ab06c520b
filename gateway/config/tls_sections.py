"""Configuration sections for TLS of the listeners, of engines and of Redis.

Relative file paths become absolute here. tls_file_rules.py checks the files, and
util/tls_contexts.py creates the TLS contexts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.config.value_types import Duration, Host, Secret, Section, setting
from gateway.util.certificate_files import KeyPair
from gateway.util.tls_contexts import (
    CIPHERS,
    ClientSettings,
    ServerSettings,
    has_valid_ciphers,
)

FOLDER_KEY = "folder"
"""Key in pydantic's validation context whose value is the folder at which relative paths start."""


def _absolute(path: str, info: ValidationInfo) -> str:
    folder = info.context.get(FOLDER_KEY) if isinstance(info.context, dict) else None
    return path if folder is None else str(Path(folder) / path)


PemFile = Annotated[
    str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_absolute)
]
"""Path of a PEM file; a relative path starts at the configuration file's folder."""


class CertificateFiles(Section):
    """The paths of a certificate and of its private key, both in PEM format."""

    certificate: PemFile = Field(
        description="Path of the certificate (PEM), followed by any intermediate certificates. "
        "The gateway notices changes of the file."
    )
    key: PemFile = Field(
        description="Path of the certificate's private key (PEM). The gateway notices changes of "
        "the file."
    )
    key_password: Secret | None = setting(
        None, "Password that decrypts the private key, by reference; none by default."
    )

    @property
    def pair(self) -> KeyPair:
        """Return the certificate, the key and the key's password as a KeyPair."""
        password = None if self.key_password is None else self.key_password.reveal()
        return KeyPair(self.certificate, self.key, password)


class ListenerTls(CertificateFiles):
    """TLS settings of one of the gateway's listeners.

    Changed certificate and key files are used for new connections only.
    """

    more: Annotated[tuple[CertificateFiles, ...], Field(max_length=64)] = setting(
        (),
        "Further certificates of the listener. A client gets the one for the server name that it "
        "asks for (SNI), else the first.",
    )
    client_ca: PemFile | None = setting(
        None,
        "Path of the certificate authorities (PEM) that sign client certificates; by default none "
        "are requested.",
    )
    client_certificates: Literal["required", "optional"] = setting(
        "required", "Whether a client must present a certificate, if client_ca is set."
    )
    minimum: Literal["1.2", "1.3"] = setting(
        "1.2", "Oldest TLS version that clients may use, written in quotes."
    )
    ciphers: Annotated[str, StringConstraints(min_length=1, max_length=1000)] = setting(
        CIPHERS,
        "Ciphers for TLS 1.2 in OpenSSL's notation. TLS 1.3 always uses its own three.",
    )
    handshake_timeout: Duration = setting(
        "10s", "Maximum time for a client to complete the TLS handshake."
    )

    @field_validator("ciphers")
    @classmethod
    def _has_known_cipher(cls, ciphers: str) -> str:
        if not has_valid_ciphers(ciphers):
            raise ValueError(
                "OpenSSL knows none of these ciphers; use names that `openssl ciphers` lists"
            )
        return ciphers

    @property
    def settings(self) -> ServerSettings:
        return ServerSettings(
            (self.pair, *(files.pair for files in self.more)),
            self.client_ca,
            self.client_certificates == "required",
            self.minimum,
            self.ciphers,
        )


class ClientTls(Section):
    """TLS settings of the gateway as a client of a server, such as an engine or Redis.

    They determine how the server is verified, and which certificate the gateway presents.
    """

    ca: PemFile | None = setting(
        None,
        "Path of the certificate authorities (PEM) by which the server's certificate is verified; "
        "by default the system's.",
    )
    certificate: PemFile | None = setting(
        None, "Path of the gateway's own certificate (PEM), if the server requests one."
    )
    key: PemFile | None = setting(None, "Path of the private key of that certificate (PEM).")
    key_password: Secret | None = setting(
        None, "Password that decrypts the private key, by reference; none by default."
    )
    verify: Annotated[bool, Field(strict=True)] = setting(
        True,
        "Whether the server's certificate is verified. false accepts any server: for tests only.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> ClientTls:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must be given together")
        if not self.verify and self.ca is not None:
            raise ValueError("ca has no effect if verify is false; remove one of them")
        return self

    @property
    def settings(self) -> ClientSettings:
        password = None if self.key_password is None else self.key_password.reveal()
        pair = None
        if self.certificate is not None and self.key is not None:
            pair = KeyPair(self.certificate, self.key, password)
        return ClientSettings(self.ca, pair, self.verify)


class EngineTls(ClientTls):
    """The configuration section `tls` of an engine whose URL begins with https://."""

    server_name: Host | None = setting(
        None,
        "Server name to request (SNI) and to expect in the engine's certificate; by default the "
        "URL's host.",
    )
