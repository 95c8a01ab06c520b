"""The interface of a discovery source, which yields a pool's endpoints after each change.

A source whose lookup fails raises nothing and yields nothing, so the endpoints that it found before
stay in use. A restart of an API server must not remove endpoints.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from gateway.config.endpoint_sections import EndpointSpec, EndpointTraits
from gateway.util.urls import http_url

log = logging.getLogger("penstock")

MAX_ENDPOINTS = 4096
"""Maximum number of endpoints of one pool. Further ones are ignored, in the order of their
addresses."""

DiscoveredEndpoints = tuple[EndpointSpec, ...]


class Source(Protocol):
    """Finds the addresses of a pool's endpoints, for example in DNS or in a Kubernetes Service."""

    def watch(self) -> AsyncIterator[DiscoveredEndpoints]:
        """Yield all known endpoints once at the start, and again after every change."""
        ...


def specs_for(
    addresses: Iterable[tuple[str, int]],
    traits: EndpointTraits,
    earlier: DiscoveredEndpoints = (),
) -> DiscoveredEndpoints:
    """Return one endpoint configuration per address, sorted by address.

    addresses  (host, port) of the endpoints; only the first MAX_ENDPOINTS are used
    traits     the settings that all of these endpoints get
    earlier    the previous result for the same traits; its configurations are reused, because
               building thousands of them takes a tenth of a second
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
