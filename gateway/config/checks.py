"""Rules between values: names that clash, pools that do not exist, equal ports, parameters a policy does not have.

They read the plain data rather than the typed tree, so that they speak up in the same run as the rules for one value.
Whatever has the wrong type here has been reported already and is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.config.problems import Path, did_you_mean, show_path
from gateway.config.source import Substituted
from policies import registry

Finding = tuple[Path, str]


def errors(data: Any) -> Iterator[Finding]:
    """Everything that makes the parts of `data` (plain values, as read) disagree: (path, message)."""
    yield from _model_names(data)
    yield from _model_pools(data)
    yield from _endpoints(data)
    yield from _ports(data)
    yield from _tenants(data)
    for path, spec in _items(_get(data, "pools"), ("pools",)):
        yield from _policy(_get(spec, "policy"), (*path, "policy"))


def warnings(data: Any) -> Iterator[Finding]:
    """What is allowed and probably not meant: (path, message)."""
    host = _get(_get(_get(data, "listeners"), "admin"), "host")
    if isinstance(host, str) and not _is_local(host):
        yield (
            ("listeners", "admin", "host"),
            f"{host} lets others reach the admin server, which shows the state of the fleet; 127.0.0.1 keeps it here",
        )
    wanted = {_get(model, "pool") for _, model in _items(_get(data, "models"), ("models",))}
    for path, _ in _items(_get(data, "pools"), ("pools",)):
        if wanted and path[-1] not in wanted:
            yield path, "no model uses this pool"


def literal_secrets(data: Any) -> Iterator[Finding]:
    """Secrets written into the file itself."""
    for path, tenant in _items(_get(data, "tenants"), ("tenants",)):
        if isinstance(_get(tenant, "key"), str) and not isinstance(_get(tenant, "key"), Substituted):
            yield (*path, "key"), "is written into the file; ${NAME} or ${file:/path} keeps it out of backups and diffs"


def _get(data: Any, key: str) -> Any:
    return data.get(key) if isinstance(data, dict) else None


def _items(data: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The mappings in a list or a mapping, each with its path."""
    pairs: Any = enumerate(data) if isinstance(data, list) else data.items() if isinstance(data, dict) else ()
    for key, item in pairs:
        if isinstance(item, dict):
            yield (*path, key), item


def _unique(found: Iterator[tuple[Path, str]], what: str) -> Iterator[Finding]:
    seen: dict[str, Path] = {}
    for path, text in found:
        if text in seen:
            yield path, f"{what} is already taken by {show_path(seen[text])}"
        seen.setdefault(text, path)


def _model_names(data: Any) -> Iterator[Finding]:
    def names() -> Iterator[tuple[Path, str]]:
        for path, model in _items(_get(data, "models"), ("models",)):
            if isinstance(_get(model, "name"), str):
                yield (*path, "name"), model["name"]
            aliases = _get(model, "aliases")
            for index, alias in enumerate(aliases if isinstance(aliases, list) else ()):
                if isinstance(alias, str):
                    yield (*path, "aliases", index), alias

    yield from _unique(names(), "this name")


def _model_pools(data: Any) -> Iterator[Finding]:
    pools = _get(data, "pools")
    if not isinstance(pools, dict) or not pools:
        return
    models = list(_items(_get(data, "models"), ("models",)))
    for path, model in models:
        pool = _get(model, "pool")
        if isinstance(pool, str) and pool not in pools:
            yield (*path, "pool"), f'there is no pool "{pool}"{did_you_mean(pool, pools)}'
    if not _get(data, "models") and len(pools) > 1:
        yield ("pools",), "several pools need models that say which pool serves which name"


def _endpoints(data: Any) -> Iterator[Finding]:
    found = [
        item
        for pool_path, pool in _items(_get(data, "pools"), ("pools",))
        for item in _items(_get(pool, "endpoints"), (*pool_path, "endpoints"))
    ]
    urls = (((*path, "url"), _bare(spec["url"])) for path, spec in found if isinstance(_get(spec, "url"), str))
    yield from _unique(urls, "this url")
    names = (((*path, "name"), spec["name"]) for path, spec in found if isinstance(_get(spec, "name"), str))
    yield from _unique(names, "this name")


def _bare(url: str) -> str:
    return str(url).rstrip("/").lower()


def _ports(data: Any) -> Iterator[Finding]:
    listeners = _get(data, "listeners")
    api, admin = _get(listeners, "api"), _get(listeners, "admin")
    api_port, admin_port = _port(api, 8080), _port(admin, 8081)
    if api_port == admin_port and api_port not in ("0", None):
        side = "admin" if _get(admin, "port") is not None else "api"
        yield ("listeners", side, "port"), f"both listeners take port {api_port}; the admin server needs its own"


def _port(listener: Any, default: int) -> str | None:
    port = _get(listener, "port")
    return str(default if port is None else port)


def _tenants(data: Any) -> Iterator[Finding]:
    tenants = list(_items(_get(data, "tenants"), ("tenants",)))
    for field in ("name", "key"):
        found = (((*path, field), item[field]) for path, item in tenants if isinstance(_get(item, field), str))
        yield from _unique(found, f"this {field}")


def _policy(spec: Any, path: Path) -> Iterator[Finding]:
    name = spec if isinstance(spec, str) else _get(spec, "name")
    if not isinstance(name, str):
        return
    at = path if isinstance(spec, str) else (*path, "name")
    if name not in registry.names():
        yield at, f'there is no policy "{name}"{did_you_mean(name, registry.names())}'
        return
    parameters = _get(spec, "parameters")
    for key, value in parameters.items() if isinstance(parameters, dict) else ():
        yield from _parameter(name, key, value, (*path, "parameters", key))


def _parameter(policy: str, key: str, value: Any, path: Path) -> Iterator[Finding]:
    fields = {field.name: field for field in msgspec.structs.fields(registry.params_type(policy))}
    if key not in fields:
        known = did_you_mean(key, fields) if fields else "; it has none"
        yield path, f"{policy} has no parameter {key}{known}"
        return
    try:
        msgspec.convert(value, fields[key].type)
    except msgspec.ValidationError as error:
        yield path, f"{error}"


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
