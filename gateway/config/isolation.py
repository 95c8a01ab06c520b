"""Rules about tenants: their names and keys, the endpoints that they have, and who would share an engine's cache.

An engine that takes no cache salt keeps one cache for all that it serves. Not here: the salts (gateway/cache_salts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.config.findings import Finding, get, items
from gateway.config.problems import Path, did_you_mean

# The request member in which an engine takes a cache salt. TensorRT-LLM knows one for chats only, and its completions
# refuse what they do not know.
SALT_MEMBERS: Mapping[str, str] = MappingProxyType({"vllm": "cache_salt", "sglang": "extra_key"})


def salt_member(engine: str, cache_salt: bool | None) -> str:
    """The member for an endpoint of which the configuration says `cache_salt`; empty when it takes none."""
    return "" if cache_salt is False else SALT_MEMBERS.get(engine, "")


def errors(data: Any) -> Iterator[Finding]:
    """Endpoints for tenants that do not exist, and those that cannot keep apart what has to be."""
    names = [
        name
        for name in (get(tenant, "name") for _, tenant in _tenants(data))
        if isinstance(name, str)
    ]
    required, domains = get(get(data, "cache"), "isolate") == "required", _domains(data)
    for path, spec in _specs(data):
        for index, name in enumerate(_list(get(spec, "tenants"))):
            if isinstance(name, str) and name not in names:
                yield Finding(
                    (*path, "tenants", index),
                    f"there is no tenant {name!r}{did_you_mean(name, names)}",
                )
        if get(spec, "cache_salt") is True and not _takes_salt(spec):
            yield Finding(
                (*path, "cache_salt"),
                f"{get(spec, 'engine')} takes none: its completions refuse one",
            )
        elif required and len(_served(spec, domains)) > 1:
            text = "takes no cache salt, so with isolate: required it may serve one tenant only; name it under tenants"
            yield Finding(path, f"{_name(spec)} {text}", on_key=True)


def warnings(data: Any) -> Iterator[Finding]:
    """Tenants that share a cache although they should not, and salts that change with a key."""
    cache, domains = get(data, "cache"), _domains(data)
    if len(set(domains.values())) < 2 or get(cache, "isolate") in ("off", False):
        return
    for path, spec in _specs(data):
        if len(_served(spec, domains)) > 1:
            text = "takes no cache salt, so tenants share its cached prompts and can tell each other's by their speed"
            yield Finding(path, f"{_name(spec)} {text}", on_key=True)
    if get(cache, "secret") is None and get(data, "shared") is None:
        text = "cache salts are derived from these keys, and a new key empties its tenant's cache; set cache.secret"
        yield Finding(("tenants",), text, on_key=True)


def _served(spec: Any, domains: Mapping[str, str]) -> set[str]:
    """The domains that an endpoint cannot keep apart; none if it can."""
    if _takes_salt(spec):
        return set()
    only = [name for name in _list(get(spec, "tenants")) if isinstance(name, str)]
    return {domains[name] for name in only if name in domains} if only else set(domains.values())


def _takes_salt(spec: Any) -> bool:
    engine, told = get(spec, "engine"), get(spec, "cache_salt")
    return bool(salt_member(str(engine or "vllm"), told if isinstance(told, bool) else None))


def _domains(data: Any) -> dict[str, str]:
    """By tenant's name: what those who share cached prompts have in common, and no others."""
    found: dict[str, str] = {}
    for _, tenant in _tenants(data):
        name, group = get(tenant, "name"), get(tenant, "cache_group")
        if isinstance(name, str):
            found[name] = f"group {group}" if isinstance(group, str) else f"tenant {name}"
    return found


def _tenants(data: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    return items(get(data, "tenants"), ("tenants",))


def _specs(data: Any) -> Iterator[tuple[Path, Any]]:
    """Every endpoint, and what is said of those that are discovered."""
    for path, pool in items(get(data, "pools"), ("pools",)):
        yield from items(get(pool, "endpoints"), (*path, "endpoints"))
        discover = get(pool, "discover")
        if isinstance(discover, dict):
            yield (*path, "discover"), get(discover, "endpoint") or {}


def _name(spec: Any) -> str:
    return str(
        get(spec, "name")
        or str(get(spec, "url") or "what is discovered here").removeprefix("http://")
    )


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
