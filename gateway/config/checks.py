"""Rules between values: names that clash, pools that do not exist, equal ports, parameters a policy does not have.

They read the plain data rather than the typed tree, so that they speak up in the same run as the rules for one value.
Whatever has the wrong type here has been reported already and is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os.path import normpath
from typing import Any

import msgspec

from gateway.config import isolation, layout_rules, pairing
from gateway.config.findings import Finding, get, items
from gateway.config.problems import Path, did_you_mean, show_path
from gateway.config.source import Substituted, numbers_if_substituted
from gateway.config.tree import Slos
from gateway.config.values import engine_url, without_scheme
from policies import admissions, registry


def errors(data: Any) -> Iterator[Finding]:
    """Everything that makes the parts of `data` (plain values, as read) disagree."""
    yield from _model_names(data)
    yield from _model_pools(data)
    yield from _served_models(data)
    yield from _endpoints(data)
    yield from _sources(data)
    yield from _ports(data)
    yield from _tenants(data)
    yield from _files_elsewhere(data)
    yield from pairing.errors(data)
    yield from layout_rules.errors(data)
    yield from isolation.errors(data)
    yield from _overflows(data)
    yield from _classes(data)
    yield from _rotation(data)
    for path, spec in items(get(data, "pools"), ("pools",)):
        yield from _named(_POLICIES, get(spec, "policy"), (*path, "policy"))
        yield from _tried(data, spec, path)
        yield from _named(_ADMISSIONS, get(spec, "admission"), (*path, "admission"))


def warnings(data: Any) -> Iterator[Finding]:
    """What is allowed and probably not meant."""
    host = get(get(get(data, "listeners"), "admin"), "host")
    if isinstance(host, str) and not _is_local(host):
        text = f"{host!r} lets others reach the admin server, which shows the fleet; 127.0.0.1 keeps it here"
        yield Finding(("listeners", "admin", "host"), text)
    wanted = {get(model, "pool") for _, model in items(get(data, "models"), ("models",))}
    for path, _ in items(get(data, "pools"), ("pools",)):
        if wanted and path[-1] not in wanted:
            yield Finding(path, "no model uses this pool", on_key=True)
    yield from _unused_names(data)
    yield from _names_to_list(data)
    yield from pairing.warnings(data)
    yield from layout_rules.warnings(data)
    yield from isolation.warnings(data)
    yield from _unverified(data)
    yield from _literal_secrets(data)


def tls_sections(data: Any) -> Iterator[tuple[Path, Any]]:
    """Every section named tls, as plain data."""
    for name in ("api", "admin"):
        yield ("listeners", name, "tls"), get(get(get(data, "listeners"), name), "tls")
    for path, spec in _specs(data):
        yield (*path, "tls"), get(spec, "tls")
    for path, pool in items(get(data, "pools"), ("pools",)):
        yield (*path, "discover", "endpoint", "tls"), get(get(get(pool, "discover"), "endpoint"), "tls")
    yield ("shared", "redis", "tls"), get(get(get(data, "shared"), "redis"), "tls")


def _unverified(data: Any) -> Iterator[Finding]:
    for path, section in tls_sections(data):
        if get(section, "verify") is False:
            yield Finding((*path, "verify"), "accepts any server: who can redirect the connection reads and changes it")


def _literal_secrets(data: Any) -> Iterator[Finding]:
    text = "is written into the file; ${NAME} or ${file:/path} keeps it out of backups and diffs"
    for path, found in _secrets(data):
        if isinstance(found, str) and not isinstance(found, Substituted):
            yield Finding(path, text)


def secrets_in_clear(data: Any) -> Iterator[Path]:
    """Where a secret stands in the text itself, if only as a reference's default."""
    for path, found in _secrets(data):
        if found is not None and not (isinstance(found, Substituted) and found.all_by_reference):
            yield path


def _files_elsewhere(data: Any) -> Iterator[Finding]:
    """A file's text in a name or a label would be shown by every page: whoever may send a text could read any file."""
    secrets = {path for path, _ in _secrets(data)}
    for path, value in _leaves(data, ()):
        if isinstance(value, Substituted) and "${file:" in value.written and path not in secrets:
            yield Finding(path, "is no secret, and ${file:...} may stand only where one is expected; write ${NAME}")


def _leaves(data: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    pairs: Any = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else None
    if pairs is None:
        yield path, data
        return
    for key, value in pairs:
        yield from _leaves(value, (*path, key))


def _secrets(data: Any) -> Iterator[tuple[Path, Any]]:
    """Every secret's path and what stands there, if anything."""
    yield from (((*path, key), get(owner, key)) for path, owner, key in _secret_owners(data))
    yield from _further_keys(data)


def _further_keys(data: Any) -> Iterator[tuple[Path, Any]]:
    for path, tenant in items(get(data, "tenants"), ("tenants",)):
        keys = get(tenant, "keys")
        yield from (((*path, "keys", index), key) for index, key in enumerate(keys if isinstance(keys, list) else ()))


def _secret_owners(data: Any) -> Iterator[tuple[Path, Any, str]]:
    yield (("admin",), get(data, "admin"), "key")
    yield (("cache",), get(data, "cache"), "secret")
    yield (("observability", "traces"), get(get(data, "observability"), "traces"), "key")
    shared = get(data, "shared")
    yield (("shared",), shared, "key")
    yield (("shared", "redis"), get(shared, "redis"), "password")
    yield from ((path, tenant, "key") for path, tenant in items(get(data, "tenants"), ("tenants",)))
    yield from ((path, spec, "api_key") for path, spec in _specs(data))
    for path, section in tls_sections(data):
        yield (path, section, "key_password")
        yield from ((inner, each, "key_password") for inner, each in items(get(section, "more"), (*path, "more")))
    for path, pool in items(get(data, "pools"), ("pools",)):
        yield ((*path, "discover", "endpoint"), get(get(pool, "discover"), "endpoint"), "api_key")


def _rotation(data: Any) -> Iterator[Finding]:
    seen = get(data, "observability")
    where = get(seen, "access_log")
    if isinstance(get(seen, "access_rotate"), dict) and (where is None or where in ("stdout", "off")):
        text = f"needs a file to rotate, and access_log is {where or 'stdout'}; give access_log a path"
        yield Finding(("observability", "access_rotate"), text, on_key=True)


def _unique(found: Iterator[tuple[Path, str]], what: str) -> Iterator[Finding]:
    seen: dict[str, Path] = {}
    for path, text in found:
        if text in seen:
            yield Finding(path, f"{what} is already taken by {show_path(seen[text])}")
        seen.setdefault(text, path)


def _model_names(data: Any) -> Iterator[Finding]:
    def names() -> Iterator[tuple[Path, str]]:
        for path, model in items(get(data, "models"), ("models",)):
            if isinstance(get(model, "name"), str):
                yield (*path, "name"), model["name"]
            aliases = get(model, "aliases")
            for index, alias in enumerate(aliases if isinstance(aliases, list) else ()):
                if isinstance(alias, str):
                    yield (*path, "aliases", index), alias

    yield from _unique(names(), "this name")


def _model_pools(data: Any) -> Iterator[Finding]:
    pools = get(data, "pools")
    if not isinstance(pools, dict) or not pools:
        return
    for path, model in items(get(data, "models"), ("models",)):
        pool = get(model, "pool")
        if isinstance(pool, str) and pool not in pools:
            yield Finding((*path, "pool"), f"there is no pool {pool!r}{did_you_mean(pool, pools)}")
    if not get(data, "models") and len(pools) > 1:
        yield Finding(("pools",), "several pools need models that say which pool serves which name")


def _served_models(data: Any) -> Iterator[Finding]:
    """An endpoint's served_model stands for one model, so it must be clear for which one of its pool."""
    for path, served, names in _shared_names(data):
        if served not in names:
            text = f"does not say for which model of its pool it stands ({', '.join(names)})"
            yield Finding(path, f"{text}: leave it out and set served_model of that model under models")


def _names_to_list(data: Any) -> Iterator[Finding]:
    for path, served, names in _shared_names(data):
        if served in names:
            others = ", ".join(name for name in names if name != served)
            text = f"stands for {served} alone: the engine must list {others}"
            yield Finding(path, f"{text}, or served_model under models must name what it lists")


def _shared_names(data: Any) -> Iterator[tuple[Path, str, list[str]]]:
    """Every served_model of an endpoint whose pool has several models that could be meant, and their names."""
    for path, pool in items(get(data, "pools"), ("pools",)):
        names = pairing.unnamed_models(data, path[-1])
        found = get(get(pool, "discover"), "endpoint")
        specs = [*items(get(pool, "endpoints"), (*path, "endpoints")), ((*path, "discover", "endpoint"), found)]
        for at, spec in specs if len(names) > 1 else ():
            if isinstance(served := get(spec, "served_model"), str):
                yield (*at, "served_model"), served, names


def _unused_names(data: Any) -> Iterator[Finding]:
    for path, spec in () if get(data, "models") else _specs(data):
        if get(spec, "served_model") is not None:
            text = "has no effect without models: clients send the names that engines list"
            yield Finding((*path, "served_model"), text)


def _specs(data: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every endpoint of every pool."""
    for path, pool in items(get(data, "pools"), ("pools",)):
        yield from items(get(pool, "endpoints"), (*path, "endpoints"))


def _endpoints(data: Any) -> Iterator[Finding]:
    for path, pool in items(get(data, "pools"), ("pools",)):
        if "endpoints" not in pool and get(pool, "discover") is None:
            yield Finding((*path, "endpoints"), "is missing: The TP groups.")
        elif get(pool, "endpoints") == [] and get(pool, "discover") is None:
            yield Finding((*path, "endpoints"), "is empty; it needs at least one item")
    specs = [(path, spec) for path, spec in _specs(data) if isinstance(get(spec, "url"), str)]
    urls = [((*path, "url"), _bare(spec["url"])) for path, spec in specs]
    yield from _unique(iter(urls), "this url")
    given = [((*path, "name"), spec["name"]) for path, spec in specs if isinstance(get(spec, "name"), str)]
    others = [
        (at, without_scheme(url)) for (at, url), (_, spec) in zip(urls, specs, strict=True) if get(spec, "name") is None
    ]
    yield from _unique(iter(others + given), "this name")  # a name that was given is what can be changed


def _sources(data: Any) -> Iterator[Finding]:
    """Names are unique over all pools, so a pool would never get anybody whom another one finds in the same place."""
    found = []
    for path, pool in items(get(data, "pools"), ("pools",)):
        discover = get(pool, "discover")
        for kind in ("dns", "file", "kubernetes"):
            place = _place(kind, get(discover, kind))
            if place is not None:
                found.append(((*path, "discover", kind), place))
    yield from _unique(iter(found), "whoever is found here")


def _place(kind: str, told: Any) -> str | None:
    """Where is looked, in words that are equal for the same place; None: it is not told, or not rightly."""
    if kind == "kubernetes":
        service = get(told, "service")
        return f"{kind} {service} {get(told, 'namespace')} {get(told, 'port')}" if isinstance(service, str) else None
    if not isinstance(told, str):
        return None
    return f"{kind} {told.lower() if kind == 'dns' else normpath(told)}"


def _bare(url: str) -> str:
    """As the tree has it; one that it refuses as it was written."""
    try:
        return engine_url(str(url))
    except ValueError:
        return str(url)


def _ports(data: Any) -> Iterator[Finding]:
    listeners = get(data, "listeners")
    api, admin = get(listeners, "api"), get(listeners, "admin")
    api_port, admin_port = _port(api, 8080), _port(admin, 8081)
    if api_port == admin_port and api_port not in ("0", None):
        side = "admin" if get(admin, "port") is not None else "api"
        text = f"both listeners take port {api_port}; the admin server needs its own"
        yield Finding(("listeners", side, "port"), text)


def _port(listener: Any, default: int) -> str | None:
    port = get(listener, "port")
    return str(default if port is None else port)


def _tenants(data: Any) -> Iterator[Finding]:
    tenants = list(items(get(data, "tenants"), ("tenants",)))
    names = (((*path, "name"), item["name"]) for path, item in tenants if isinstance(get(item, "name"), str))
    yield from _unique(names, "this name")
    keys = [((*path, "key"), get(item, "key")) for path, item in tenants]
    yield from _unique(((at, key) for at, key in (*keys, *_further_keys(data)) if isinstance(key, str)), "this key")


def _overflows(data: Any) -> Iterator[Finding]:
    """A smaller tier is another model of the list, named once."""
    found = [get(model, "name") for _, model in items(get(data, "models"), ("models",))]
    names = [name for name in found if isinstance(name, str)]
    for path, model in items(get(data, "models"), ("models",)):
        own, tiers = get(model, "name"), list(items(get(model, "overflow"), (*path, "overflow")))
        for at, tier in tiers:
            to = get(tier, "model")
            if isinstance(to, str) and to not in names:
                yield Finding((*at, "model"), f"there is no model {to!r}{did_you_mean(to, names)}")
            elif isinstance(to, str) and to == own:
                yield Finding((*at, "model"), "a model cannot overflow into itself")
        named = [((*at, "model"), tier["model"]) for at, tier in tiers if isinstance(get(tier, "model"), str)]
        yield from _unique(iter(named), "this model")


def _classes(data: Any) -> Iterator[Finding]:
    """Every class that is named exists."""
    slo = get(data, "slo")
    classes = get(slo, "classes")
    known = tuple(classes) if isinstance(classes, dict) else tuple(Slos().classes)
    default = get(slo, "default")
    named = [(("slo", "default"), default), *_class_users(data)]
    for path, name in named:
        if isinstance(name, str) and name not in known:
            yield Finding(path, f"there is no class {name!r}{did_you_mean(name, known)}")
    if default is None and Slos().default not in known:
        yield Finding(("slo", "classes"), f"there is no class {Slos().default!r} here; name another in slo.default")


def _class_users(data: Any) -> Iterator[tuple[Path, Any]]:
    for section in ("models", "tenants"):
        for path, each in items(get(data, section), (section,)):
            yield (*path, "slo"), get(each, "slo")


class _Registry(msgspec.Struct, frozen=True):
    """What can be named with parameters: `what` in words, and its names and types."""

    what: str
    names: Callable[[], tuple[str, ...]]
    params_type: Callable[[str], type[msgspec.Struct]]


_POLICIES = _Registry("policy", registry.names, registry.params_type)
_ADMISSIONS = _Registry("admission", admissions.names, admissions.params_type)


def _named(kind: _Registry, spec: Any, path: Path) -> Iterator[Finding]:
    name = spec if isinstance(spec, str) else get(spec, "name")
    if not isinstance(name, str):
        return
    at = path if isinstance(spec, str) else (*path, "name")
    if name not in kind.names():
        yield Finding(at, f"there is no {kind.what} {name!r}{did_you_mean(name, kind.names())}")
        return
    parameters = get(spec, "parameters")
    fields = {field.name: field for field in msgspec.structs.fields(kind.params_type(name))}
    if not isinstance(parameters, dict):
        return
    found = [
        finding
        for key, value in parameters.items()
        for finding in _parameter(name, key, value, fields, (*path, "parameters", key))
    ]
    yield from found or _together(kind.params_type(name), parameters, (*path, "parameters"))


def _tried(data: Any, pool: Any, path: Path) -> Iterator[Finding]:
    """Policies beside the one that serves, and tenants whose requests are to be tried with one."""
    shadows = get(pool, "shadow")
    for index, spec in enumerate(shadows if isinstance(shadows, list) else ()):
        yield from _named(_POLICIES, spec, (*path, "shadow", index))
    canary = get(pool, "canary")
    yield from _named(_POLICIES, get(canary, "policy"), (*path, "canary", "policy"))
    known = [get(tenant, "name") for _, tenant in items(get(data, "tenants"), ("tenants",))]
    tenants = get(canary, "tenants")
    for index, name in enumerate(tenants if isinstance(tenants, list) else ()):
        if isinstance(name, str) and name not in known:
            hint = did_you_mean(name, [each for each in known if isinstance(each, str)])
            yield Finding((*path, "canary", "tenants", index), f"there is no tenant {name!r}{hint}")


def _parameter(owner: str, key: str, value: Any, fields: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    if key not in fields:
        known = did_you_mean(key, fields) if fields else "; it has none"
        yield Finding(path, f"{owner} has no parameter {key}{known}", on_key=True)
        return
    try:
        msgspec.convert(numbers_if_substituted(value), fields[key].type)
    except msgspec.ValidationError as error:
        yield Finding(path, str(error))


def _together(params: type[msgspec.Struct], given: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """What the parameters' own rule says of them all, where each may be what it is."""
    try:
        msgspec.convert(numbers_if_substituted(given), params)
    except msgspec.ValidationError as error:
        yield Finding(path, str(error), on_key=True)


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
