"""Tests of which connection is closed when too many have not proven to have the key."""

from __future__ import annotations

from unittest.mock import Mock

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.links.unproven_links import UnprovenLinks


def link(host: str, port: int = 1) -> Mock:
    return Mock(peer=f"{host}:{port}")


def test_the_oldest_of_a_full_address_is_dropped_for_the_newest() -> None:
    links = UnprovenLinks(most=10, per_address=2)
    first, second, third = (link("10.0.0.1", port) for port in range(3))
    other = link("10.0.0.2")
    dropped = [links.admit(link) for link in (other, first, second, third)]
    assert dropped == [None, None, None, first]
    assert len(links) == 3


def test_without_room_the_address_with_the_most_links_gives_up_its_oldest() -> None:
    links = UnprovenLinks(most=3, per_address=3)
    member, first, second, newcomer = (
        link("10.0.0.9"),
        link("10.0.0.1"),
        link("10.0.0.1", 2),
        link("10.0.0.2"),
    )
    dropped = [links.admit(link) for link in (member, first, second, newcomer)]
    assert dropped == [None, None, None, first]


def test_a_link_that_showed_the_key_is_dropped_for_no_other_and_leaves_room() -> None:
    links = UnprovenLinks(most=2, per_address=2)
    proven, idle = link("10.0.0.1"), link("10.0.0.1", 2)
    for item in (proven, idle):
        links.admit(item)
    links.remove(proven)
    links.remove(proven)
    assert links.admit(link("10.0.0.1", 3)) is None
    assert links.admit(link("10.0.0.1", 4)) is idle


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80),
    st.integers(1, 12),
    st.integers(1, 12),
)
@settings(deadline=None)
def test_bounds_hold_and_every_newcomer_is_admitted(
    arrivals: list[tuple[int, bool]], most: int, per_address: int
) -> None:
    links = UnprovenLinks(most, per_address)
    links_: list[Mock] = []
    for host, proves in arrivals:
        newcomer = link(f"10.0.0.{host}", len(links_))
        dropped = links.admit(newcomer)
        if dropped is not None:
            links_.remove(dropped)  # type: ignore[arg-type]
        links_.append(newcomer)
        if proves:
            links.remove(links_.pop(0))
        assert len(links) == len(links_) <= most
        hosts = [link.peer.partition(":")[0] for link in links_]
        assert all(hosts.count(host) <= per_address for host in hosts)
