"""Checks values against each other: duplicate names and URLs, unknown pools, classes and ports.

The checks read plain data and not the typed tree, so that their errors are reported together with
those of single values. They ignore a value of the wrong type, because that is reported elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from os.path import normpath
from typing import Any

from gateway.config import (
    alias_rules,
    layout_rules,
    policy_rules,
    role_rules,
    secret_rules,
    tenant_rules,
)
from gateway.config.auto_section import auto_errors
from gateway.config.problems import Path, did_you_mean, show_path
from gateway.config.rule_findings import (
    RuleFinding,
    get_member,
    iter_endpoints,
    iter_mappings,
    iter_tls_sections,
)
from gateway.config.secret_rules import further_keys
from gateway.config.slo_section import Slos
from gateway.config.values import engine_url, without_scheme


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each inconsistency between configuration values.

    `data` is the configuration as plain data, as parsed from the file.
    """
    yield from _model_names(data)
    yield from alias_rules.errors(data)
    yield from _model_pools(data)
    yield from _served_models(data)
    yield from _endpoints(data)
    yield from _discovery_sources(data)
    yield from _ports(data)
    yield from _tenants(data)
    yield from secret_rules.errors(data)
    yield from role_rules.errors(data)
    yield from layout_rules.errors(data)
    yield from tenant_rules.errors(data)
    yield from _overflows(data)
    yield from _classes(data)
    yield from _rotation(data)
    yield from _sized_for(data)
    yield from auto_errors(data)
    for path, spec in iter_mappings(get_member(data, "pools"), ("pools",)):
        yield from _mirrors(data, spec, path)
    yield from policy_rules.errors(data)


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield warnings about configuration values that are permitted but probably unintended."""
    host = get_member(get_member(get_member(data, "listeners"), "admin"), "host")
    if isinstance(host, str) and not _is_local(host):
        text = (
            f"{host!r} makes the admin server, which shows the fleet, reachable from elsewhere; "
            "127.0.0.1 keeps it local"
        )
        yield RuleFinding(("listeners", "admin", "host"), text)
    used = {
        get_member(model, "pool")
        for _, model in iter_mappings(get_member(data, "models"), ("models",))
    }
    for path, _ in iter_mappings(get_member(data, "pools"), ("pools",)):
        if used and path[-1] not in used | _mirrored_to(data):
            yield RuleFinding(path, "is used by no model", is_on_key=True)
    yield from _unused_names(data)
    yield from _names_to_list(data)
    yield from role_rules.warnings(data)
    yield from layout_rules.warnings(data)
    yield from tenant_rules.warnings(data)
    yield from alias_rules.warnings(data)
    yield from _unverified(data)
    yield from secret_rules.warnings(data)


def _unverified(data: Any) -> Iterator[RuleFinding]:
    for path, section in iter_tls_sections(data):
        if get_member(section, "verify") is False:
            text = "accepts any server: anyone who redirects the connection can read and change it"
            yield RuleFinding((*path, "verify"), text)


def _rotation(data: Any) -> Iterator[RuleFinding]:
    section = get_member(data, "observability")
    log = get_member(section, "access_log")
    is_file = log is not None and log not in ("stdout", "off")
    if isinstance(get_member(section, "access_rotate"), dict) and not is_file:
        text = (
            f"needs a file to rotate, and access_log is {log or 'stdout'}; give access_log a path"
        )
        yield RuleFinding(("observability", "access_rotate"), text, is_on_key=True)


def _mirrors(data: Any, spec: Any, path: Path) -> Iterator[RuleFinding]:
    to, pools = get_member(get_member(spec, "mirror"), "to"), get_member(data, "pools")
    if not isinstance(to, str) or not isinstance(pools, dict):
        return
    place = (*path, "mirror", "to")
    if to == path[-1]:
        yield RuleFinding(place, "is the pool itself; name the pool of the candidate engines")
    elif to not in pools:
        guess = did_you_mean(to, list(map(str, pools)))
        yield RuleFinding(place, f"there is no pool {to!r}{guess}")
    models = get_member(get_member(spec, "mirror"), "models")
    own = {
        get_member(model, "name")
        for _, model in iter_mappings(get_member(data, "models"), ("models",))
        if get_member(model, "pool") == path[-1]
    }
    for index, name in enumerate(models if isinstance(models, list) and own else ()):
        if name not in own:
            guess = did_you_mean(str(name), sorted(map(str, own)))
            text = f"the pool serves no model {name!r}{guess}"
            yield RuleFinding((*path, "mirror", "models", index), text)


def _mirrored_to(data: Any) -> set[Any]:
    pools = iter_mappings(get_member(data, "pools"), ("pools",))
    return {get_member(get_member(spec, "mirror"), "to") for _, spec in pools}


def _sized_for(data: Any) -> Iterator[RuleFinding]:
    pools = get_member(data, "pools")
    for path, block in iter_mappings(get_member(data, "sized_for"), ("sized_for",)):
        if isinstance(pools, dict) and path[-1] not in pools:
            guess = did_you_mean(str(path[-1]), list(map(str, pools)))
            yield RuleFinding(path, f"there is no pool {path[-1]!r}{guess}", is_on_key=True)
        rates = get_member(block, "hourly_rates")
        if isinstance(rates, list) and len(rates) not in (0, 24):
            text = f"has {len(rates)} numbers, and a day has 24 hours; valid: 24 numbers, or none"
            yield RuleFinding((*path, "hourly_rates"), text, is_on_key=True)


def _unique(values: Iterator[tuple[Path, str]], what: str) -> Iterator[RuleFinding]:
    seen: dict[str, Path] = {}
    for path, text in values:
        if text in seen:
            yield RuleFinding(path, f"{what} is already taken by {show_path(seen[text])}")
        seen.setdefault(text, path)


def _model_names(data: Any) -> Iterator[RuleFinding]:
    def names() -> Iterator[tuple[Path, str]]:
        for path, model in iter_mappings(get_member(data, "models"), ("models",)):
            if isinstance(get_member(model, "name"), str):
                yield (*path, "name"), model["name"]
            aliases = get_member(model, "aliases")
            for index, alias in enumerate(aliases if isinstance(aliases, list) else ()):
                if isinstance(alias, str):
                    yield (*path, "aliases", index), alias

    yield from _unique(names(), "this name")


def _model_pools(data: Any) -> Iterator[RuleFinding]:
    pools = get_member(data, "pools")
    if not isinstance(pools, dict) or not pools:
        return
    for path, model in iter_mappings(get_member(data, "models"), ("models",)):
        pool = get_member(model, "pool")
        if isinstance(pool, str) and pool not in pools:
            yield RuleFinding(
                (*path, "pool"), f"there is no pool {pool!r}{did_you_mean(pool, pools)}"
            )
    if not get_member(data, "models") and len(pools) > 1:
        yield RuleFinding(
            ("pools",), "several pools need models that say which pool serves which name"
        )


def _served_models(data: Any) -> Iterator[RuleFinding]:
    for path, served, names in _shared_names(data):
        if served not in names:
            text = f"could mean any model of its pool ({', '.join(names)})"
            remedy = "leave it out and set served_model of that model under models"
            yield RuleFinding(path, f"{text}: {remedy}")


def _names_to_list(data: Any) -> Iterator[RuleFinding]:
    for path, served, names in _shared_names(data):
        if served in names:
            others = ", ".join(name for name in names if name != served)
            text = f"is the name of {served} only: the engine must list {others}"
            yield RuleFinding(path, f"{text}, or served_model under models must be a name it lists")


def _shared_names(data: Any) -> Iterator[tuple[Path, str, list[str]]]:
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        names = role_rules.unnamed_models(data, path[-1])
        template = get_member(get_member(pool, "discover"), "endpoint")
        specs = [
            *iter_mappings(get_member(pool, "endpoints"), (*path, "endpoints")),
            ((*path, "discover", "endpoint"), template),
        ]
        for spec_path, spec in specs if len(names) > 1 else ():
            if isinstance(served := get_member(spec, "served_model"), str):
                yield (*spec_path, "served_model"), served, names


def _unused_names(data: Any) -> Iterator[RuleFinding]:
    for path, spec in () if get_member(data, "models") else iter_endpoints(data):
        if get_member(spec, "served_model") is not None:
            text = "has no effect without models: requests use the names that engines list"
            yield RuleFinding((*path, "served_model"), text)


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
    yield from _unique(iter(urls), "this url")
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
    # Given names come last, because they are what can be changed to resolve a clash.
    yield from _unique(iter(derived + given), "this name")


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
    yield from _unique(iter(sources), "this source")


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


def _ports(data: Any) -> Iterator[RuleFinding]:
    listeners = get_member(data, "listeners")
    api, admin = get_member(listeners, "api"), get_member(listeners, "admin")
    api_port, admin_port = _port(api, 8080), _port(admin, 8081)
    if api_port == admin_port and api_port not in ("0", None):
        side = "admin" if get_member(admin, "port") is not None else "api"
        text = f"both listeners take port {api_port}; the admin server needs its own"
        yield RuleFinding(("listeners", side, "port"), text)


def _port(listener: Any, default: int) -> str | None:
    port = get_member(listener, "port")
    return str(default if port is None else port)


def _tenants(data: Any) -> Iterator[RuleFinding]:
    tenants = list(iter_mappings(get_member(data, "tenants"), ("tenants",)))
    names = (
        ((*path, "name"), item["name"])
        for path, item in tenants
        if isinstance(get_member(item, "name"), str)
    )
    yield from _unique(names, "this name")
    keys = [((*path, "key"), get_member(item, "key")) for path, item in tenants]
    all_keys = (*keys, *further_keys(data))
    yield from _unique(((path, key) for path, key in all_keys if isinstance(key, str)), "this key")


def _overflows(data: Any) -> Iterator[RuleFinding]:
    values = [
        get_member(model, "name")
        for _, model in iter_mappings(get_member(data, "models"), ("models",))
    ]
    names = [name for name in values if isinstance(name, str)]
    for path, model in iter_mappings(get_member(data, "models"), ("models",)):
        own = get_member(model, "name")
        targets = [
            ((*tier_path, "model"), tier["model"])
            for tier_path, tier in iter_mappings(get_member(model, "overflow"), (*path, "overflow"))
            if isinstance(get_member(tier, "model"), str)
        ]
        for target_path, target in targets:
            if target not in names:
                text = f"there is no model {target!r}{did_you_mean(target, names)}"
                yield RuleFinding(target_path, text)
            elif target == own:
                yield RuleFinding(target_path, "a model cannot overflow into itself")
        yield from _unique(iter(targets), "this model")


def _classes(data: Any) -> Iterator[RuleFinding]:
    slo = get_member(data, "slo")
    classes = get_member(slo, "classes")
    known = tuple(classes) if isinstance(classes, dict) else tuple(Slos().classes)
    default = get_member(slo, "default")
    uses = [(("slo", "default"), default), *_class_uses(data)]
    for path, name in uses:
        if isinstance(name, str) and name not in known:
            yield RuleFinding(path, f"there is no class {name!r}{did_you_mean(name, known)}")
    if default is None and Slos().default not in known:
        yield RuleFinding(
            ("slo", "classes"),
            f"there is no class {Slos().default!r} here; name another in slo.default",
        )


def _class_uses(data: Any) -> Iterator[tuple[Path, Any]]:
    yield ("batch", "slo"), get_member(get_member(data, "batch"), "slo")
    for section in ("models", "tenants"):
        for path, item in iter_mappings(get_member(data, section), (section,)):
            yield (*path, "slo"), get_member(item, "slo")


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
