"""TLS towards engines and Redis.

All endpoints with the same settings share one context, which is made again when their files change.
"""

from __future__ import annotations

import logging
import ssl
from time import time
from typing import Any

from gateway import tls
from gateway.config import ClientTls, EndpointSpec

log = logging.getLogger("penstock")


class ClientContexts:
    """Contexts by settings. Loading the system's authorities takes 10 ms: thousands of endpoints share one."""

    def __init__(self) -> None:
        self._made: dict[tls.ClientSettings, tuple[object, ssl.SSLContext]] = {}

    def of(self, spec: EndpointSpec) -> tls.Encryption | None:
        """What connections to the endpoint need; None for http://."""
        if not spec.url.startswith("https://"):
            return None
        section = spec.tls
        settings = tls.ClientSettings() if section is None else section.settings
        return tls.Encryption(
            self._context(settings), None if section is None else section.server_name
        )

    def _context(self, settings: tls.ClientSettings) -> ssl.SSLContext:
        """Where a file cannot be used, the last context that could stays; the first time, one that trusts no server."""
        stamp = tls.stamp_of(settings)
        last = self._made.get(settings)
        if last is not None and last[0] == stamp:
            return last[1]
        try:
            context = tls.client_context(settings)
            doubt = None if settings.pair is None else tls.valid_times(settings.pair).doubt(time())
            if settings.pair is not None and doubt is not None:
                log.warning(
                    "TLS towards engines: the certificate %s %s", settings.pair.certificate, doubt
                )
        except (OSError, ValueError) as error:
            log.error(
                "TLS towards engines: %s cannot be used: %s",
                ", ".join(tls.files_of(settings)),
                error,
            )
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if last is None else last[1]
        self._made[settings] = stamp, context
        return context


def context_of(section: ClientTls | None) -> ssl.SSLContext:
    """A context for one use. Raises OSError when a file cannot be used."""
    return tls.client_context(tls.ClientSettings() if section is None else section.settings)


def redis_settings(url: str, section: ClientTls | None) -> tls.ClientSettings | None:
    """What connections to this Redis need; None for redis://."""
    if not url.startswith("rediss://"):
        return None
    return tls.ClientSettings() if section is None else section.settings


def redis_options(settings: tls.ClientSettings | None) -> dict[str, Any]:
    """The same as arguments of redis-py's clients, which make a context for each connection from the files."""
    if settings is None:
        return {}
    options: dict[str, Any] = {
        "ssl_cert_reqs": "required" if settings.verify else "none",
        "ssl_check_hostname": settings.verify,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }
    if settings.ca is not None:
        options["ssl_ca_certs"] = settings.ca
    if settings.pair is not None:
        pair = settings.pair
        options |= {
            "ssl_certfile": pair.certificate,
            "ssl_keyfile": pair.key,
            "ssl_password": pair.password,
        }
    return options
