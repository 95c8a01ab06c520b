"""Tests of which addresses count as one client, for limits per client."""

from __future__ import annotations

import pytest

from gateway.util.client_networks import Networks, client_group, parse_address


def test_an_address_is_in_any_of_its_networks() -> None:
    networks = Networks(("10.0.0.0/8", "2001:db8::/32", "192.0.2.7/32"))
    assert networks
    for inside in ("10.1.2.3", "2001:db8:5::1", "192.0.2.7", "::ffff:10.9.9.9"):
        assert inside in networks
    for outside in (
        "11.0.0.1",
        "2001:db9::1",
        "192.0.2.8",
        "",
        "/run/a.sock",
        "10.0.0.0/8",
        "fe80::1%eth0",
    ):
        assert outside not in networks


def test_no_address_is_in_an_empty_set() -> None:
    assert not Networks(())
    assert "127.0.0.1" not in Networks(())


def test_a_zone_does_not_change_an_address() -> None:
    assert str(parse_address("fe80::1%eth0")) == "fe80::1"


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
        ("a:b", "a:b"),
    ],
)
def test_connections_are_counted_by_ipv4_address_or_ipv6_slash_64(address: str, group: str) -> None:
    assert client_group(address) == group
