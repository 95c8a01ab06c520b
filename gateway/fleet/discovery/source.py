"""The interface of a discovery source, which yields all known endpoints after each change.

When a lookup fails, a source raises nothing and yields nothing, so that the last known endpoints
stay: a restarting API server must not disable the endpoints. discovery.py uses the sources.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from gateway.config.endpoint_sections import EndpointSpec, EndpointTraits
from gateway.util.addresses import http_url

log = logging.getLogger("penstock")

MAX_ENDPOINTS = 4096
"""Maximum number of endpoints of one pool. Further ones are ignored, in the order of their
addresses."""

DiscoveredEndpoints = tuple[EndpointSpec, ...]


class Source(Protocol):
    """A source of endpoint addresses, such as a DNS name or a Kubernetes Service."""

    def watch(self) -> AsyncIterator[DiscoveredEndpoints]:
        """Yield all endpoints that the source knows: first at the start, then after every
        change.
        """
        ...


def specs_for(
    addresses: Iterable[tuple[str, int]],
    traits: EndpointTraits,
    earlier: DiscoveredEndpoints = (),
) -> DiscoveredEndpoints:
    """Return endpoint configurations with equal traits for these addresses, sorted by address.

    At most MAX_ENDPOINTS are returned. Those in `earlier`, a result for the same traits, are used
    again: with thousands of endpoints, building them all takes a tenth of a second.
    """
    shared = {name: getattr(traits, name) for name in type(traits).model_fields}
    wanted = sorted(set(addresses))[:MAX_ENDPOINTS]
    encrypted = traits.tls is not None
    urls = [http_url(host, port, encrypted=encrypted) for host, port in wanted]
    spec_of = {spec.url: spec for spec in earlier}
    return tuple(
        spec_of.get(url) or EndpointSpec.model_construct(url=url, name=None, **shared)
        for url in urls
    )
