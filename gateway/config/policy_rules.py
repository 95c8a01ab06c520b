"""Checks policies in a configuration: names, parameters, trial policies, and admission policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from gateway.config.auto_section import AUTO
from gateway.config.problems import Path, did_you_mean
from gateway.config.rule_findings import RuleFinding, get_member, iter_mappings
from gateway.config.yaml_source import numbers_if_substituted
from policies import admission_registry, policy_registry


class _Registry(msgspec.Struct, frozen=True):
    # A registry of policies, which are chosen by name and have parameters.
    #
    # what  the kind of its policies, as error messages name it

    what: str
    names: Callable[[], tuple[str, ...]]
    params_type: Callable[[str], type[msgspec.Struct]]


_POLICIES = _Registry("policy", policy_registry.names, policy_registry.params_type)
_ADMISSIONS = _Registry("admission", admission_registry.names, admission_registry.params_type)


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each unknown policy, and for each unknown or invalid parameter."""
    for path, spec in iter_mappings(get_member(data, "pools"), ("pools",)):
        yield from _pool_policies(spec, path)
        yield from _trials(data, spec, path)
        yield from _registered(_ADMISSIONS, get_member(spec, "admission"), (*path, "admission"))


def _pool_policies(pool: Any, path: Path) -> Iterator[RuleFinding]:
    policy = get_member(pool, "policy")
    if get_member(policy, "name") == AUTO:
        text = "write `policy: auto`, and its settings in the pool's section `auto`"
        yield RuleFinding((*path, "policy", "name"), text)
    elif policy != AUTO:
        yield from _registered(_POLICIES, policy, (*path, "policy"))
    portfolio = get_member(get_member(pool, AUTO), "portfolio")
    for index, spec in enumerate(portfolio if isinstance(portfolio, list) else ()):
        yield from _registered(_POLICIES, spec, (*path, AUTO, "portfolio", index))


def _trials(data: Any, pool: Any, path: Path) -> Iterator[RuleFinding]:
    shadows = get_member(pool, "shadow")
    for index, spec in enumerate(shadows if isinstance(shadows, list) else ()):
        yield from _registered(_POLICIES, spec, (*path, "shadow", index))
    canary = get_member(pool, "canary")
    yield from _registered(_POLICIES, get_member(canary, "policy"), (*path, "canary", "policy"))
    names = [
        get_member(tenant, "name")
        for _, tenant in iter_mappings(get_member(data, "tenants"), ("tenants",))
    ]
    known = [name for name in names if isinstance(name, str)]
    tenants = get_member(canary, "tenants")
    for index, name in enumerate(tenants if isinstance(tenants, list) else ()):
        if isinstance(name, str) and name not in known:
            text = f"there is no tenant {name!r}{did_you_mean(name, known)}"
            yield RuleFinding((*path, "canary", "tenants", index), text)


def _registered(registry: _Registry, spec: Any, path: Path) -> Iterator[RuleFinding]:
    name = spec if isinstance(spec, str) else get_member(spec, "name")
    if not isinstance(name, str):
        return
    known = registry.names()
    if name not in known:
        name_path = path if isinstance(spec, str) else (*path, "name")
        text = f"there is no {registry.what} {name!r}{did_you_mean(name, known)}"
        yield RuleFinding(name_path, text)
        return
    parameters = get_member(spec, "parameters")
    params_type = registry.params_type(name)
    fields = {field.name: field for field in msgspec.structs.fields(params_type)}
    if not isinstance(parameters, dict):
        return
    findings = [
        finding
        for key, value in parameters.items()
        for finding in _parameter(name, key, value, fields, (*path, "parameters", key))
    ]
    yield from findings or _combination(params_type, parameters, (*path, "parameters"))


def _parameter(
    owner: str, key: str, value: Any, fields: Mapping[str, Any], path: Path
) -> Iterator[RuleFinding]:
    if key not in fields:
        hint = did_you_mean(key, fields) if fields else "; it has none"
        yield RuleFinding(path, f"{owner} has no parameter {key}{hint}", is_on_key=True)
        return
    try:
        msgspec.convert(numbers_if_substituted(value), fields[key].type)
    except msgspec.ValidationError as error:
        yield RuleFinding(path, str(error))


def _combination(
    params: type[msgspec.Struct], given: Mapping[str, Any], path: Path
) -> Iterator[RuleFinding]:
    # Yield what is wrong with the given parameters together, by the rules of their type `params`.
    #
    # Each parameter alone has been found valid before.
    try:
        msgspec.convert(numbers_if_substituted(given), params)
    except msgspec.ValidationError as error:
        yield RuleFinding(path, str(error), is_on_key=True)
