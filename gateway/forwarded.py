"""What a trusted proxy says about the client behind it: its address, and the proxy's own id of the request.

Only connections from `listeners.api.trusted_proxies` are asked: any other client could claim anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.networks import Networks, parse_address

FORWARDED_FOR, REQUEST_ID = "x-forwarded-for", "x-request-id"
MOST_HOPS = 32
_REQUEST_ID = re.compile(r"[0-9A-Za-z._:/+=-]{1,128}")


class TrustedProxies:
    """Reads forwarding headers. Remembers which peers are proxies: a parse takes microseconds, and peers repeat."""

    __slots__ = ("_known", "_networks")

    MOST_KNOWN = 1024

    def __init__(self, networks: Networks) -> None:
        self._networks = networks
        self._known: dict[str, bool] = {}

    def is_proxy(self, address: str) -> bool:
        """Whether a connection from this address is a trusted proxy's."""
        known = self._known.get(address)
        if known is None:
            if len(self._known) >= self.MOST_KNOWN:
                self._known.clear()
            known = self._known[address] = address in self._networks
        return known

    def client_address(self, headers: Mapping[str, str], peer: str) -> str:
        """The address of the client: in X-Forwarded-For, the rightmost one that is no trusted proxy.

        Each proxy appends the address that it saw, so all that stands left of that one was said by
        the client itself. Text that is no address ends the search at the last good one.
        """
        found = peer
        for hop in reversed(_all_values(headers, FORWARDED_FOR).split(",")[-MOST_HOPS:]):
            address = parse_address(_without_port(hop.strip()))
            if address is None:
                break
            found = str(address)
            if found not in self._networks:
                break
        return found


def proxy_request_id(headers: Mapping[str, str]) -> str:
    """The proxy's id of the request, for the access log; "" without one, or if it has odd characters."""
    text = headers.get(REQUEST_ID, "")
    return text if _REQUEST_ID.fullmatch(text) else ""


def _all_values(headers: Mapping[str, str], name: str) -> str:
    """The values of all lines with this name: a proxy may append a line instead of extending one."""
    getall = getattr(headers, "getall", None)
    return headers.get(name, "") if getall is None else ",".join(getall(name, ()))


def _without_port(text: str) -> str:
    """An address as proxies write it: 192.0.2.1, 192.0.2.1:4711, 2001:db8::1 or [2001:db8::1]:4711."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text
