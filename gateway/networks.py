"""Client addresses: which networks hold them, and which of them count as one client."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

CLIENT_PREFIX_BITS = 64
"""Bits of an IPv6 address that name a client: providers give each customer at least one /64."""


class Networks:
    """A set of IP networks, written in CIDR form. `address in networks` is true for an address of any of them.

    A text that is no IP address, as of a Unix socket's peer, is in no network.
    """

    __slots__ = ("_networks",)

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: tuple[IPv4Network | IPv6Network, ...] = tuple(map(ip_network, networks))

    def __bool__(self) -> bool:
        return bool(self._networks)

    def __contains__(self, address: str) -> bool:
        if not self._networks:
            return False
        found = parse_address(address)
        return found is not None and any(found in each for each in self._networks)


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """The address in a text, without a zone; an IPv4 address mapped into IPv6 as IPv4. None for other text."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def client_group(address: str) -> str:
    """What connections are counted by: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    found = parse_address(address)
    if not isinstance(found, IPv6Address):
        return address if found is None else str(found)
    host_bits = found.max_prefixlen - CLIENT_PREFIX_BITS
    return str(IPv6Address(int(found) >> host_bits << host_bits))
