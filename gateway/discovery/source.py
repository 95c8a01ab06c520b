"""What a source of endpoints is: it yields all it knows whenever that changed, and never an error.

A source that cannot be asked keeps silent, and what it said last stays: an API server that restarts must not take a
fleet down. Not here: what becomes of it (discovery.py).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from gateway.config.tree import EndpointSpec, EndpointTraits
from gateway.ports import http_url

log = logging.getLogger("penstock")

MOST = 4096
"""Endpoints of one pool; the rest of what a source says is passed over, in the order of their addresses."""

Found = tuple[EndpointSpec, ...]


class Source(Protocol):
    """One place that knows endpoints."""

    def watch(self) -> AsyncIterator[Found]:
        """Everybody it knows, at first and after every change; for ever."""
        ...


def specs(addresses: Iterable[tuple[str, int]], traits: EndpointTraits) -> Found:
    """Endpoints at these addresses, alike but for where they are; in an order that depends on nothing else."""
    like = {name: getattr(traits, name) for name in type(traits).model_fields}
    known = sorted(set(addresses))[:MOST]
    encrypted = traits.tls is not None
    urls = [http_url(*each, encrypted=encrypted) for each in known]
    return tuple(EndpointSpec.model_construct(url=url, name=None, **like) for url in urls)
