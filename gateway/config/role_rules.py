"""Checks endpoint roles: a pool needs endpoints for whole requests, or for both prefill and decode.

At run time, gateway/disagg/pairing.py combines prefill and decode endpoints by the same rule as
these checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.config.problems import Path
from gateway.config.rule_findings import RuleFinding, get_member, iter_mappings
from kvtransfer import dialects
from kvtransfer.dialects import Dialect, Prerequisite
from policies.pricing.split_decision import kv_compatibility_key

Specs = list[tuple[Path, dict[str, Any]]]

NEED_BOOTSTRAP = (Prerequisite.ADDRESS, Prerequisite.QUERY)


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each model without endpoints that can serve it, whole or split.

    To split a model's requests means to serve prefill and decode by different endpoints.
    """
    reported: set[Path] = set()
    for path, model in iter_mappings(get_member(data, "models"), ("models",)):
        specs = _endpoints(data, get_member(model, "pool"))
        split = get_member(model, "split")
        if specs and not split and all(_role(spec) == "prefill" for _, spec in specs):
            text = "all endpoints of this pool are for prefill only, so none can serve the model"
            yield RuleFinding((*path, "pool"), text)
        dialect = dialects.DIALECTS.get(str(get_member(split, "dialect")))
        if specs and dialect is not None:
            yield from _without_repeats(_dialect_errors(dialect, specs), reported)
            is_clear = len(unnamed_models(data, get_member(model, "pool"))) < 2
            yield from _pair_errors((*path, "split"), model, dialect, specs, is_clear=is_clear)
    if not get_member(data, "models"):
        for path, _ in iter_mappings(get_member(data, "pools"), ("pools",)):
            specs = _endpoints(data, path[-1])
            if specs and all(_role(spec) == "prefill" for _, spec in specs):
                text = "all of them are for prefill only, and no model has a split"
                yield RuleFinding((*path, "endpoints"), text)


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield warnings about prefill endpoints without requests, and splits without prefill."""
    split_pools = {
        get_member(model, "pool")
        for _, model in iter_mappings(get_member(data, "models"), ("models",))
        if get_member(model, "split")
    }
    for path, _ in iter_mappings(get_member(data, "pools"), ("pools",)):
        for spec_path, spec in _endpoints(data, path[-1]):
            if _role(spec) == "prefill" and path[-1] not in split_pools:
                text = "no model of this pool has a split, so it will get no requests"
                yield RuleFinding((*spec_path, "role"), text)
    for path, model in iter_mappings(get_member(data, "models"), ("models",)):
        specs = _endpoints(data, get_member(model, "pool"))
        dialect = dialects.DIALECTS.get(str(get_member(get_member(model, "split"), "dialect")))
        if (
            specs
            and dialect is not None
            and dialect.can_decode_alone
            and all(_role(spec) == "decode" for _, spec in specs)
        ):
            yield RuleFinding(
                (*path, "split"),
                "no endpoint of its pool is for prefill, so requests are not split",
                is_on_key=True,
            )


def _without_repeats(findings: Iterator[RuleFinding], reported: set[Path]) -> Iterator[RuleFinding]:
    # Yield only findings at new paths, since models may share a pool.
    for finding in findings:
        if finding.path not in reported:
            reported.add(finding.path)
            yield finding


def _endpoints(data: Any, pool: Any) -> Specs:
    if not isinstance(pool, str):
        return []
    return list(
        iter_mappings(
            get_member(get_member(get_member(data, "pools"), pool), "endpoints"),
            ("pools", pool, "endpoints"),
        )
    )


def _role(spec: Mapping[str, Any]) -> str:
    return str(spec.get("role", "both"))


def _dialect_errors(dialect: Dialect, specs: Specs) -> Iterator[RuleFinding]:
    for path, spec in specs:
        engine = str(spec.get("engine", "vllm"))
        if engine != dialect.engine:
            text = (
                f"is {engine}; the split of its pool uses the dialect {dialect.name}, "
                f"which only {dialect.engine} supports"
            )
            yield RuleFinding((*path, "engine") if "engine" in spec else path, text)
        elif (
            dialect.needs in NEED_BOOTSTRAP and _role(spec) == "prefill" and "bootstrap" not in spec
        ):
            yield RuleFinding(
                path, f"a prefill endpoint in {dialect.name} needs bootstrap: host:port"
            )


def unnamed_models(data: Any, pool: object) -> list[str]:
    """Return the names of a pool's models that have no `served_model` in the configuration."""
    models = (
        model
        for _, model in iter_mappings(get_member(data, "models"), ("models",))
        if get_member(model, "pool") == pool
    )
    return [
        str(get_member(model, "name"))
        for model in models
        if get_member(model, "served_model") is None
    ]


def _pair_errors(
    path: Path, model: Any, dialect: Dialect, specs: Specs, *, is_clear: bool
) -> Iterator[RuleFinding]:
    # Yield what prevents a model's endpoints from forming pairs for prefill and decode.
    #
    # `is_clear`: an endpoint's served_model can only mean this model.
    groups: dict[str, list[str]] = {}
    name, served = str(get_member(model, "name")), get_member(model, "served_model")
    for _, spec in specs:
        labels = get_member(spec, "labels")
        own_name = spec.get("served_model") if is_clear else None
        key = kv_compatibility_key(
            dialect.engine,
            str(served or own_name or name),
            labels if isinstance(labels, dict) else {},
        )
        groups.setdefault(key, []).append(_role(spec))
    roles = [role for group in groups.values() for role in group]
    # Without prefill endpoints the decode endpoints serve whole requests, if the dialect allows it.
    if "prefill" not in roles and "both" not in roles:
        if not dialect.can_decode_alone:
            text = (
                f"no endpoint of its pool is for prefill, and {dialect.name} cannot decode without"
            )
            yield RuleFinding(path, text, is_on_key=True)
        return
    if not any(_has_pair(group) for group in groups.values()):
        text = (
            "no two endpoints of its pool fit together: one to prefill and another to decode, with "
            "equal served_model and equal version and kv_dtype labels"
        )
        yield RuleFinding(path, text, is_on_key=True)


def _has_pair(roles: list[str]) -> bool:
    prefills, decodes, both = (roles.count(role) for role in ("prefill", "decode", "both"))
    return bool((prefills and decodes) or (both and (prefills or decodes)) or both > 1)
