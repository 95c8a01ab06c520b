"""TLS sections of the configuration: of the listeners, of engines, and of Redis. Paths of files are made absolute here.

Not here: whether the files can be used (tls_files.py) and the contexts made of them (gateway/tls.py).
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

from gateway import tls
from gateway.config.values import Duration, Host, Secret, Section, setting

FOLDER = "folder"
"""Key of the validation context: the folder that relative paths start from."""


def _absolute(path: str, info: ValidationInfo) -> str:
    folder = info.context.get(FOLDER) if isinstance(info.context, dict) else None
    return path if folder is None else str(Path(folder) / path)


PemFile = Annotated[
    str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_absolute)
]
"""Path of a PEM file; a relative one starts at the configuration's folder."""


class CertificateFiles(Section):
    """A certificate and its private key, as PEM files."""

    certificate: PemFile = Field(
        description="Path of the certificate, with the intermediate ones behind it (PEM). It is followed."
    )
    key: PemFile = Field(description="Path of its private key (PEM). It is followed.")
    key_password: Secret | None = setting(
        None, "Password of the private key, by reference; none unless given."
    )

    @property
    def pair(self) -> tls.KeyPair:
        """The files as a value."""
        password = None if self.key_password is None else self.key_password.reveal()
        return tls.KeyPair(self.certificate, self.key, password)


class ListenerTls(CertificateFiles):
    """TLS of one listener. Changed files are used for new connections; open ones go on."""

    more: Annotated[tuple[CertificateFiles, ...], Field(max_length=64)] = setting(
        (),
        "Further certificates. A client gets the one with its server name (SNI), else the first.",
    )
    client_ca: PemFile | None = setting(
        None,
        "Path of the authorities (PEM) that sign client certificates; clients are not asked for one unless given.",
    )
    client_certificates: Literal["required", "optional"] = setting(
        "required", "With client_ca: whether a client without a certificate is refused."
    )
    minimum: Literal["1.2", "1.3"] = setting("1.2", "Oldest version of TLS, in quotes.")
    ciphers: Annotated[str, StringConstraints(min_length=1, max_length=1000)] = setting(
        tls.CIPHERS, "Ciphers of TLS 1.2, as OpenSSL writes them. TLS 1.3 has its own three."
    )
    handshake_timeout: Duration = setting("10s", "Time for a client to complete the TLS handshake.")

    @field_validator("ciphers")
    @classmethod
    def _known(cls, ciphers: str) -> str:
        if not tls.has_valid_ciphers(ciphers):
            raise ValueError("names no cipher that OpenSSL knows")
        return ciphers

    @property
    def settings(self) -> tls.ServerSettings:
        """What a context is made of."""
        return tls.ServerSettings(
            (self.pair, *(each.pair for each in self.more)),
            self.client_ca,
            self.client_certificates == "required",
            self.minimum,
            self.ciphers,
        )


class ClientTls(Section):
    """How the gateway, as a client, trusts a server and identifies itself."""

    ca: PemFile | None = setting(
        None,
        "Path of the authorities (PEM) that sign the server's certificate; the system's unless given.",
    )
    certificate: PemFile | None = setting(
        None, "Path of the gateway's own certificate (PEM), if the server asks."
    )
    key: PemFile | None = setting(None, "Path of its private key (PEM).")
    key_password: Secret | None = setting(
        None, "Password of the private key, by reference; none unless given."
    )
    verify: Annotated[bool, Field(strict=True)] = setting(
        True,
        "Whether the server must prove its identity. false accepts any server: for tests only.",
    )

    @model_validator(mode="after")
    def _fits(self) -> ClientTls:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key need each other")
        if not self.verify and self.ca is not None:
            raise ValueError("ca has no meaning where verify is false; remove one of them")
        return self

    @property
    def settings(self) -> tls.ClientSettings:
        """What a context is made of."""
        password = None if self.key_password is None else self.key_password.reveal()
        pair = None
        if self.certificate is not None and self.key is not None:
            pair = tls.KeyPair(self.certificate, self.key, password)
        return tls.ClientSettings(self.ca, pair, self.verify)


class EngineTls(ClientTls):
    """TLS towards an engine behind an https:// URL."""

    server_name: Host | None = setting(
        None,
        "Name to ask for (SNI) and to expect in the engine's certificate; the URL's host unless given.",
    )
