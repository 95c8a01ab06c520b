"""Checks the endpoints of a configuration: each pool has some, and no name or URL occurs twice.

A discovery source (the place where a pool's endpoints are found) may serve only one pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from os.path import normpath
from typing import Any

from gateway.config.rule_findings import (
    RuleFinding,
    find_repeated,
    get_member,
    iter_endpoints,
    iter_mappings,
)
from gateway.config.value_types import engine_url, without_scheme


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each pool without endpoints, and for repeated URLs, names or sources."""
    yield from _endpoints(data)
    yield from _discovery_sources(data)


def _endpoints(data: Any) -> Iterator[RuleFinding]:
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        if "endpoints" not in pool and get_member(pool, "discover") is None:
            yield RuleFinding((*path, "endpoints"), "is missing; list endpoints, or set discover")
        elif get_member(pool, "endpoints") == [] and get_member(pool, "discover") is None:
            yield RuleFinding((*path, "endpoints"), "is empty; it needs at least one item")
    specs = [
        (path, spec)
        for path, spec in iter_endpoints(data)
        if isinstance(get_member(spec, "url"), str)
    ]
    urls = [((*path, "url"), _normalized(spec["url"])) for path, spec in specs]
    yield from find_repeated(iter(urls), "this url")
    given = [
        ((*path, "name"), spec["name"])
        for path, spec in specs
        if isinstance(get_member(spec, "name"), str)
    ]
    derived = [
        (path, without_scheme(url))
        for (path, url), (_, spec) in zip(urls, specs, strict=True)
        if get_member(spec, "name") is None
    ]
    # Configured names are checked last, so that a clash is reported at a name that can be changed.
    yield from find_repeated(iter(derived + given), "this name")


def _discovery_sources(data: Any) -> Iterator[RuleFinding]:
    # Yield errors for discovery sources that another pool already uses.
    #
    # Endpoint names are unique over all pools, so the second pool would never get any endpoint.
    sources = []
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        discover = get_member(pool, "discover")
        for kind in ("dns", "file", "kubernetes"):
            key = _source_key(kind, get_member(discover, kind))
            if key is not None:
                sources.append(((*path, "discover", kind), key))
    yield from find_repeated(iter(sources), "this source")


def _source_key(kind: str, value: Any) -> str | None:
    # Return a text that is equal for equal sources, or None if the value is missing or invalid.
    if kind == "kubernetes":
        service = get_member(value, "service")
        if not isinstance(service, str):
            return None
        return f"{kind} {service} {get_member(value, 'namespace')} {get_member(value, 'port')}"
    if not isinstance(value, str):
        return None
    return f"{kind} {value.lower() if kind == 'dns' else normpath(value)}"


def _normalized(url: str) -> str:
    # Return the URL as in the typed tree; return an invalid one as written.
    try:
        return engine_url(str(url))
    except ValueError:
        return str(url)
