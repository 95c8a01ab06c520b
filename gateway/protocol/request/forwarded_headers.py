"""Reads what trusted proxies in front of the gateway add: the client's address, a request id.

They are used only on connections from `listeners.api.trusted_proxies`, because any other client
could forge them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.util.client_networks import Networks, parse_address

FORWARDED_FOR, REQUEST_ID = "x-forwarded-for", "x-request-id"
MAX_HOPS = 32
_REQUEST_ID = re.compile(r"[0-9A-Za-z._:/+=-]{1,128}")


class TrustedProxies:
    """The networks of trusted proxies, with a cache of the addresses that were looked up."""

    __slots__ = ("_cache", "_networks")

    MAX_CACHED = 1024

    def __init__(self, networks: Networks) -> None:
        self._networks = networks
        self._cache: dict[str, bool] = {}

    def is_proxy(self, address: str) -> bool:
        """Return whether `address` is the address of a trusted proxy."""
        is_proxy = self._cache.get(address)
        if is_proxy is None:
            if len(self._cache) >= self.MAX_CACHED:
                self._cache.clear()
            is_proxy = self._cache[address] = address in self._networks
        return is_proxy

    def client_address(self, headers: Mapping[str, str], peer: str) -> str:
        """Return the client's address: the last in X-Forwarded-For that is not a trusted proxy's.

        Each proxy appends the address from which it received the request. Anything before that may
        have been written by the client itself. The search goes from right to left and ends at text
        that is not an address. Without the header, the result is `peer`, the address of the
        connection.
        """
        client = peer
        for hop in reversed(all_values(headers, FORWARDED_FOR).split(",")[-MAX_HOPS:]):
            address = parse_address(_without_port(hop.strip()))
            if address is None:
                break
            client = str(address)
            if client not in self._networks:
                break
        return client


def proxy_request_id(headers: Mapping[str, str]) -> str:
    """Return the proxy's request id for the access log, or "" if it is missing or invalid."""
    return plain_request_id(headers.get(REQUEST_ID, ""))


def plain_request_id(text: str) -> str:
    """Return `text` if it is a valid request id (1 to 128 plain characters), else ""."""
    return text if _REQUEST_ID.fullmatch(text) else ""


def all_values(headers: Mapping[str, str], name: str) -> str:
    """Return the values of all header lines with this name, joined by commas.

    A request may have several such lines, because a proxy may add one after the client's.
    """
    getall = getattr(headers, "getall", None)
    return headers.get(name, "") if getall is None else ",".join(getall(name, ()))


def _without_port(text: str) -> str:
    # Strip the port from 192.0.2.1, 192.0.2.1:4711, 2001:db8::1 or [2001:db8::1]:4711.
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text
