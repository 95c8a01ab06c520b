"""Who may talk to the admin server: by which name it was asked for, from which page, with which credential.

A page in a browser may not reach it under a name of its own (DNS rebinding) and may not have it do anything (CSRF).
Reading needs no credential; whatever changes something needs the configured key or, without one, to come from here.
"""

from __future__ import annotations

import hashlib
import hmac
from asyncio import BaseTransport
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from socket import AF_UNIX
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.config import Config

OPEN = frozenset({"/healthz", "/readyz"})
"""Asked by whoever looks after the process, under whatever name."""

SAFE = frozenset({"GET", "HEAD"})
FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP")


def guard(config: Callable[[], Config]) -> Middleware:
    """Refuses with 401 or 403, and why, before a page is asked. `config` is the one in force."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        now = config()
        refused = None if request.path in OPEN else misnamed(request, now)
        if refused is None and request.method not in SAFE:
            refused = foreign(request) or unknown(request, now)
        answer = refused or await handler(request)
        answer.headers.setdefault("X-Content-Type-Options", "nosniff")
        answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    return guarded


def misnamed(request: web.Request, config: Config) -> web.Response | None:
    """A refusal of a Host that nobody said we have. An address is always ours; a name may be anybody's."""
    host = request.headers.get("Host")
    name = _hostname(host) if host is not None else "localhost"  # HTTP/1.0, which no browser speaks
    if name is not None and (_address(name) or name in _names(config)):
        return None
    return refuse(403, f"Host {str(host)[:100]!r} is not one of this server's names; add it to admin.hosts")


def foreign(request: web.Request) -> web.Response | None:
    """A refusal of what another site's page sends."""
    origin = request.headers.get("Origin")
    same = origin is None or _netloc(origin) == request.headers.get("Host")
    if same and request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return None
    return refuse(403, "pages of other sites may not change anything here")


def unknown(request: web.Request, config: Config) -> web.Response | None:
    """A refusal of who has not shown the key, or is not on this machine when there is none."""
    if request.transport is not None and _is_ours(request.transport):
        return None
    key = config.admin.key
    if key is not None:
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        given, wanted = _digest(shown.strip()), _digest(key.reveal())
        if scheme.lower() == "bearer" and hmac.compare_digest(given, wanted):
            return None
        return refuse(401, "changes need the key in admin.key: send 'Authorization: Bearer <key>'")
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    address = _address(peer[0]) if isinstance(peer, tuple) else None
    if address is not None and _here(address) and not any(name in request.headers for name in FORWARDED):
        return None
    return refuse(403, "without admin.key only this machine may change anything, and not through a proxy")


def _is_ours(transport: BaseTransport) -> bool:
    """A worker's socket in its supervisor's folder: nobody else may enter that, and who asks has been judged there."""
    line = transport.get_extra_info("socket")
    return line is not None and bool(line.family == AF_UNIX)


def is_supervisor(request: web.Request) -> bool:
    """Return whether the supervisor of this worker sent the request."""
    return request.transport is not None and _is_ours(request.transport)


def refuse(status: int, why: str) -> web.Response:
    """A JSON error."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return web.json_response({"result": "refused", "message": why}, status=status, headers=headers)


def _names(config: Config) -> set[str]:
    return {name.lower() for name in ("localhost", config.listeners.admin.host, *config.admin.hosts)}


def _netloc(origin: str) -> str:
    """Host and port; of what is no URL, nothing that a Host could be."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _here(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
