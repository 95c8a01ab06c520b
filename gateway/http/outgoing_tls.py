"""TLS settings for the gateway's outgoing connections to engines and to Redis.

Endpoints with equal settings share one SSLContext. It is created again when one of its files
changes.
"""

from __future__ import annotations

import logging
import ssl
from time import time
from typing import Any

from gateway.config import ClientTls, EndpointSpec
from gateway.util.certificate_files import certificate_validity
from gateway.util.tls_contexts import (
    ClientSettings,
    Encryption,
    client_context,
    files_stamp,
    settings_files,
)

log = logging.getLogger("penstock")


class ClientContexts:
    """A cache of SSLContext objects by their TLS settings.

    Loading the system's certificate authorities takes about 10 ms, so contexts are shared.
    """

    def __init__(self) -> None:
        self._cache: dict[ClientSettings, tuple[object, ssl.SSLContext]] = {}

    def encryption_for(self, spec: EndpointSpec) -> Encryption | None:
        """Return the TLS settings for connections to an endpoint, or None if its URL is http://."""
        if not spec.url.startswith("https://"):
            return None
        section = spec.tls
        settings = ClientSettings() if section is None else section.settings
        return Encryption(self._context(settings), None if section is None else section.server_name)

    def _context(self, settings: ClientSettings) -> ssl.SSLContext:
        # Return the SSLContext for `settings`, rebuilt if one of its files has changed.
        #
        # If a file cannot be used, the previous context stays in force. Without a previous one, the
        # returned context trusts no server.
        stamp = files_stamp(settings)
        last = self._cache.get(settings)
        if last is not None and last[0] == stamp:
            return last[1]
        try:
            context = client_context(settings)
            doubt = (
                None
                if settings.key_pair is None
                else certificate_validity(settings.key_pair).refusal_reason(time())
            )
            if settings.key_pair is not None and doubt is not None:
                path = settings.key_pair.certificate
                log.warning("TLS to engines: the certificate of %s %s", path, doubt)
        except (OSError, ValueError) as error:
            paths = ", ".join(settings_files(settings))
            log.error("TLS to engines: the file %s cannot be used: %s", paths, error)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if last is None else last[1]
        self._cache[settings] = stamp, context
        return context


def new_context(section: ClientTls | None) -> ssl.SSLContext:
    """Create a new SSLContext for a client, without using the cache.

    Raises OSError if a file cannot be used.
    """
    return client_context(ClientSettings() if section is None else section.settings)


def redis_settings(url: str, section: ClientTls | None) -> ClientSettings | None:
    """Return the TLS settings for connections to the Redis server at `url`; None for redis://."""
    if not url.startswith("rediss://"):
        return None
    return ClientSettings() if section is None else section.settings


def redis_options(settings: ClientSettings | None) -> dict[str, Any]:
    """Return TLS settings as keyword arguments for redis-py, which creates its own SSLContext.

    The result is empty if `encryption` is None.
    """
    if settings is None:
        return {}
    options: dict[str, Any] = {
        "ssl_cert_reqs": "required" if settings.should_verify else "none",
        "ssl_check_hostname": settings.should_verify,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }
    if settings.ca is not None:
        options["ssl_ca_certs"] = settings.ca
    if settings.key_pair is not None:
        pair = settings.key_pair
        options |= {
            "ssl_certfile": pair.certificate,
            "ssl_keyfile": pair.key,
            "ssl_password": pair.password,
        }
    return options
