"""Checks the tenants of a configuration: names, keys, endpoints, and isolation of cached prompts.

An engine isolates tenants by a cache salt: a member of the request that is part of the hash of each
cached block. gateway/protocol/request/cache_salts.py computes it. An engine without cache salts has
one cache for all tenants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.config.problems import Path, did_you_mean
from gateway.config.rule_findings import (
    RuleFinding,
    find_repeated,
    get_member,
    iter_mappings,
)
from gateway.config.secret_rules import further_keys
from policies.engine_kinds import ENGINE_TRAITS


def salt_member(engine: str, cache_salt: bool | None) -> str:
    """Return the name of the JSON member for an engine's cache salt; "" if it takes no salt.

    `cache_salt` is the endpoint's setting in the configuration; None means the engine's default.
    """
    if cache_salt is False or engine not in ENGINE_TRAITS:
        return ""
    return ENGINE_TRAITS[engine].salt_member


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each repeated or unknown tenant, and each endpoint without isolation.

    Endpoints that cannot isolate tenants are errors only with `cache.isolate: required`.
    """
    yield from _repeated(data)
    names = [
        name
        for name in (get_member(tenant, "name") for _, tenant in _tenants(data))
        if isinstance(name, str)
    ]
    required = get_member(get_member(data, "cache"), "isolate") == "required"
    domains = _domains(data)
    for path, spec in _specs(data):
        for index, name in enumerate(_list(get_member(spec, "tenants"))):
            if isinstance(name, str) and name not in names:
                yield RuleFinding(
                    (*path, "tenants", index),
                    f"there is no tenant {name!r}{did_you_mean(name, names)}",
                )
        if get_member(spec, "cache_salt") is True and not _takes_salt(spec):
            yield RuleFinding(
                (*path, "cache_salt"),
                f"{get_member(spec, 'engine')} has no request member for a cache salt",
            )
        elif required and len(_served(spec, domains)) > 1:
            text = (
                f"{_name(spec)} takes no cache salt, so with isolate: required it may serve one "
                "tenant only; name it under tenants"
            )
            yield RuleFinding(path, text, is_on_key=True)


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield warnings about tenants that share cached prompts, and about unstable cache salts.

    A salt is unstable if it is derived from an API key: a new key then empties the tenant's cache.
    """
    cache, domains = get_member(data, "cache"), _domains(data)
    if len(set(domains.values())) < 2 or get_member(cache, "isolate") in ("off", False):
        return
    for path, spec in _specs(data):
        if len(_served(spec, domains)) > 1:
            text = (
                f"{_name(spec)} takes no cache salt, so tenants share its cached prompts and can "
                "detect each other's by their response time"
            )
            yield RuleFinding(path, text, is_on_key=True)
    if get_member(cache, "secret") is None and get_member(data, "shared") is None:
        text = (
            "cache salts are derived from these API keys, so a new key makes its tenant's cached "
            "prompts useless; set cache.secret"
        )
        yield RuleFinding(("tenants",), text, is_on_key=True)


def _served(spec: Any, domains: Mapping[str, str]) -> set[str]:
    # Return the cache domains whose tenants an endpoint serves, if its engine takes no cache salt.
    #
    # An engine that takes a salt keeps the domains apart; the set is empty for it.
    if _takes_salt(spec):
        return set()
    names = [name for name in _list(get_member(spec, "tenants")) if isinstance(name, str)]
    if not names:
        return set(domains.values())
    return {domains[name] for name in names if name in domains}


def _takes_salt(spec: Any) -> bool:
    engine, setting = get_member(spec, "engine"), get_member(spec, "cache_salt")
    cache_salt = setting if isinstance(setting, bool) else None
    return bool(salt_member(str(engine or "vllm"), cache_salt))


def _domains(data: Any) -> dict[str, str]:
    domains: dict[str, str] = {}
    for _, tenant in _tenants(data):
        name, group = get_member(tenant, "name"), get_member(tenant, "cache_group")
        if isinstance(name, str):
            domains[name] = f"group {group}" if isinstance(group, str) else f"tenant {name}"
    return domains


def _repeated(data: Any) -> Iterator[RuleFinding]:
    tenants = list(_tenants(data))
    names = (
        ((*path, "name"), item["name"])
        for path, item in tenants
        if isinstance(get_member(item, "name"), str)
    )
    yield from find_repeated(names, "this name")
    keys = [((*path, "key"), get_member(item, "key")) for path, item in tenants]
    all_keys = (*keys, *further_keys(data))
    yield from find_repeated(
        ((path, key) for path, key in all_keys if isinstance(key, str)), "this key"
    )


def _tenants(data: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    return iter_mappings(get_member(data, "tenants"), ("tenants",))


def _specs(data: Any) -> Iterator[tuple[Path, Any]]:
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        yield from iter_mappings(get_member(pool, "endpoints"), (*path, "endpoints"))
        discover = get_member(pool, "discover")
        if isinstance(discover, dict):
            yield (*path, "discover"), get_member(discover, "endpoint") or {}


def _name(spec: Any) -> str:
    name = get_member(spec, "name") or str(get_member(spec, "url") or "a discovered endpoint")
    return str(name).removeprefix("http://")


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
