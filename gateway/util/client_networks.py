"""Networks of client addresses, and the rule for which addresses count as one client."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

CLIENT_PREFIX_BITS = 64
"""Length in bits of the IPv6 prefix that identifies a client, because providers assign at least a
/64 to each.
"""


class Networks:
    """A set of IP networks in CIDR notation that supports `address in networks`.

    Text that is not an IP address, such as the peer name of a Unix socket, is in no network.
    """

    __slots__ = ("_networks",)

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: tuple[IPv4Network | IPv6Network, ...] = tuple(map(ip_network, networks))

    def __bool__(self) -> bool:
        return bool(self._networks)

    def __contains__(self, address: str) -> bool:
        if not self._networks:
            return False
        parsed = parse_address(address)
        return parsed is not None and any(parsed in network for network in self._networks)


def normalize_network(text: str) -> str:
    """Return a network in CIDR notation, in its canonical spelling.

    Raises ValueError if the text is not a network, or has address bits beyond its prefix length.
    """
    try:
        return str(ip_network(text))
    except ValueError:
        pass
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            "a network must be written in CIDR form, as in 10.0.0.0/8 or 2001:db8::/32"
        ) from None
    raise ValueError(f"has address bits beyond its prefix length; its network is {network}")


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return `text` as an IP address; None if it is not one.

    A zone id is dropped, and an IPv4 address mapped into IPv6 becomes an IPv4 address.
    """
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def client_group(address: str) -> str:
    """Return the key by which a client's connections are counted: its IPv4 address or IPv6 /64."""
    if ":" not in address:
        return address
    parsed = parse_address(address)
    if not isinstance(parsed, IPv6Address):
        return address if parsed is None else str(parsed)
    host_bits = parsed.max_prefixlen - CLIENT_PREFIX_BITS
    return str(IPv6Address(int(parsed) >> host_bits << host_bits))
