"""Tests of addresses of agents and clients: host and port, and limits per client."""

from __future__ import annotations

import pytest

from kvtransfer.util.network_addresses import client_address, split_host_port


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.1.2.3:5000", "10.1.2.3"),
        ("gpu1.example:5000", "gpu1.example"),
        ("::1:5000", "::1"),
        ("[::1]:5000", "::1"),
    ],
)
def test_an_address_has_a_host_and_a_port_with_brackets_or_without(address: str, host: str) -> None:
    assert split_host_port(address) == (host, 5000)


@pytest.mark.parametrize("address", ["", "10.1.2.3", "gpu1:", "[::1]"])
def test_an_address_without_a_port_is_an_error(address: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        split_host_port(address)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("127.0.0.2:5000", "127.0.0.2"),
        ("::ffff:10.1.2.3:5000", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6:5000", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9:5001", "2001:db8:1:2::/64"),
        ("fe80::1%eth0:5000", "fe80::/64"),
        ("a process of this host", "a process of this host"),
    ],
)
def test_the_ports_of_a_host_and_the_addresses_of_an_ipv6_network_are_one_client(
    peer: str, address: str
) -> None:
    assert client_address(peer) == address
