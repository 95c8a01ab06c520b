"""Runs all checks of values against each other; itself checks ports, classes, mirrors, logging.

The checks read plain data and not the typed tree, so that their errors are reported together with
those of single values. They ignore a value of the wrong type, because that is reported elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.config import (
    alias_rules,
    endpoint_rules,
    layout_rules,
    model_rules,
    policy_rules,
    role_rules,
    secret_rules,
    tenant_rules,
)
from gateway.config.auto_section import auto_errors
from gateway.config.problems import Path, did_you_mean
from gateway.config.rule_findings import (
    RuleFinding,
    get_member,
    iter_mappings,
    iter_tls_sections,
)
from gateway.config.slo_section import Slos


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each inconsistency between configuration values.

    `data` is the configuration as plain data, as parsed from the file.
    """
    yield from model_rules.errors(data)
    yield from alias_rules.errors(data)
    yield from endpoint_rules.errors(data)
    yield from _ports(data)
    yield from secret_rules.errors(data)
    yield from role_rules.errors(data)
    yield from layout_rules.errors(data)
    yield from tenant_rules.errors(data)
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
    yield from model_rules.warnings(data)
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
            text = f"must have 24 numbers, one for each hour of a day, or none; it has {len(rates)}"
            yield RuleFinding((*path, "hourly_rates"), text, is_on_key=True)


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
