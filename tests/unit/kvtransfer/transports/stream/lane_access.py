"""Helpers for tests of parallel connections (lanes): find them, and pause their threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvtransfer.transport_interface import Link
from kvtransfer.transports.stream.parallel_links import LanedLink


def laned(link: Link) -> LanedLink:
    assert isinstance(link, LanedLink)
    return link


def lanes_of(link: Link) -> tuple[LanedLink, ...]:
    return laned(link)._lane_links


@contextmanager
def standing(*links: Link) -> Iterator[None]:
    # Pause the threads of these links during a `with` block, as a long copy would.
    each = [laned(link) for link in links]
    for link in each:
        link._count_drivers(1)
    with ExitStack() as still:
        for link in each:
            still.callback(link._count_drivers, -1)
            link._wake()
            still.enter_context(link._driver_lock)
        yield
