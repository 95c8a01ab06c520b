"""Parses addresses host:port of agents and clients, and finds the part that identifies a client."""

from __future__ import annotations

import ipaddress


def split_host_port(address: str) -> tuple[str, int]:
    """Return the host and the port of an address. An IPv6 host may be in brackets.

    Raises ValueError if the address has no port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def client_address(peer: str) -> str:
    """Return the part of a client's address that the client cannot change at will.

    This is its IPv4 address, or the /64 network of its IPv6 address; limits per client count by it.
    A text that is not host:port, such as the name of a connection within the host, is returned
    unchanged.
    """
    host = peer.rpartition(":")[0].strip("[]") or peer
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))
