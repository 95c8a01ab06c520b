"""Security of the admin server: allowed hosts and origins, credentials, and response headers.

- The check of the Host header stops a web page that reaches the server under the page's own host
  name (DNS rebinding).
- The check of the origin stops requests from pages of other sites (CSRF).
- Reading needs no credential. Changes need the configured key. If none is configured, they must
  come from this machine.
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

UNCHECKED_PATHS = frozenset({"/healthz", "/readyz"})
"""Admin paths that are served under any Host header, for process supervisors and load balancers."""

SAFE_METHODS = frozenset({"GET", "HEAD"})
FORWARDING_HEADERS = (
    "Forwarded",
    "Via",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Real-IP",
)


def access_middleware(config: Callable[[], Config]) -> Middleware:
    """Return aiohttp middleware that refuses a request with status 401 or 403 and the reason.

    `config` is a function that returns the current configuration.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        current_config = config()
        refusal = None if request.path in UNCHECKED_PATHS else check_host(request, current_config)
        if refusal is None and request.method not in SAFE_METHODS:
            refusal = check_same_origin(request) or check_credentials(request, current_config)
        response = refusal or await handler(request)
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    return guarded


def check_host(request: web.Request, config: Config) -> web.Response | None:
    """Return a 403 response if the Host header does not name this admin server, else None.

    An IP address is always accepted, because a DNS rebinding attack needs a host name.
    """
    host = request.headers.get("Host")
    # Only HTTP/1.0 clients send no Host, and browsers are not among them.
    name = _hostname(host) if host is not None else "localhost"
    if name is not None and (_address(name) or name in _server_names(config)):
        return None
    return error_response(
        403, f"Host {str(host)[:100]!r} is not a name of this server; add it to admin.hosts"
    )


def check_same_origin(request: web.Request) -> web.Response | None:
    """Return a 403 response if a page of another web site has sent the request, else None."""
    origin = request.headers.get("Origin")
    same = origin is None or _netloc(origin) == request.headers.get("Host")
    if same and request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return None
    return error_response(403, "requests from pages of other sites cannot change anything")


def check_credentials(request: web.Request, config: Config) -> web.Response | None:
    """Return a 401 or 403 response if the request may not make changes, else None.

    A request may make changes if it has the configured admin key. If no key is configured, it must
    come from this machine, and not through a proxy.
    """
    if request.transport is not None and _is_supervisor(request.transport):
        return None
    key = config.admin.key
    if key is not None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token_digest, key_digest = _digest(token.strip()), _digest(key.reveal())
        if scheme.lower() == "bearer" and hmac.compare_digest(token_digest, key_digest):
            return None
        return error_response(
            401, "changes need the key of admin.key: send 'Authorization: Bearer <key>'"
        )
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    address = _address(peer[0]) if isinstance(peer, tuple) else None
    if (
        address is not None
        and _is_loopback(address)
        and not any(name in request.headers for name in FORWARDING_HEADERS)
    ):
        return None
    return error_response(
        403, "without admin.key, changes must come from this machine and not through a proxy"
    )


def _is_supervisor(transport: BaseTransport) -> bool:
    # Return whether the connection is a worker's Unix socket in its supervisor's private folder.
    #
    # Only the supervisor can connect to it, and it has already checked the request.
    connection = transport.get_extra_info("socket")
    return connection is not None and bool(connection.family == AF_UNIX)


def is_supervisor(request: web.Request) -> bool:
    return request.transport is not None and _is_supervisor(request.transport)


def error_response(status: int, message: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return web.json_response(
        {"result": "refused", "message": message}, status=status, headers=headers
    )


def _server_names(config: Config) -> set[str]:
    return {
        name.lower() for name in ("localhost", config.listeners.admin.host, *config.admin.hosts)
    }


def _netloc(origin: str) -> str:
    # Return the host and port of an origin, or "" if it is not a URL.
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


def _is_loopback(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
