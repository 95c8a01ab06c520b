"""TLS settings as values, and the SSLContext objects that are created from them.

The listeners and the clients of engines use this module. It reads files and opens no connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.util.certificate_files import KeyPair, certificate_validity, file_stamp, load_pair

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The cipher suites for TLS 1.2: those with forward secrecy and authenticated encryption. TLS 1.3
has no others."""

ALPN = ("http/1.1",)
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
WRITE_BUFFER_BYTES = 64 * 1024
"""Number of unsent bytes at which a writer is paused; the same as without TLS. uvloop would allow
512 KiB."""


class ServerSettings(msgspec.Struct, frozen=True):
    """The TLS settings of one of the gateway's listeners.

    key_pairs           certificates; the first one serves clients that ask for an unknown name
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


def server_context(settings: ServerSettings) -> ssl.SSLContext:
    """Create the SSLContext of a listener.

    Raises OSError (or its subclass ssl.SSLError) if a file cannot be used.
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
    """Create the SSLContext of a client. Raises OSError if a file cannot be used."""
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
        load_pair(context, settings.key_pair)
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
    """Return a value that changes whenever one of the TLS files, or a link to it, changes."""
    return tuple(file_stamp(path) for path in settings_files(settings))


def has_valid_ciphers(ciphers: str) -> bool:
    """Return whether OpenSSL knows at least one cipher of the list."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(ciphers)
    except ssl.SSLError:
        return False
    return True


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
    load_pair(context, pair)
    if settings.client_ca is not None:
        context.load_verify_locations(settings.client_ca)
        context.verify_mode = (
            ssl.CERT_REQUIRED if settings.is_client_required else ssl.CERT_OPTIONAL
        )
    return context
