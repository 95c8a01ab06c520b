"""Rules about roles: somebody must serve whole requests, or somebody prefill and somebody decode, in one dialect.

Lives here: what a configuration must say for splitting to be possible. Not here: who is paired with whom at run time
(gateway/split/pairing.py, by the same key).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.config.findings import Finding, get, items
from gateway.config.problems import Path
from kvtransfer import dialects
from kvtransfer.dialects import Dialect, Needs
from policies.split import compat

Specs = list[tuple[Path, dict[str, Any]]]

NEED_BOOTSTRAP = (Needs.ADDRESS, Needs.QUERY)


def errors(data: Any) -> Iterator[Finding]:
    """What makes a model impossible to serve, or to split in the dialect it names."""
    told: set[Path] = set()
    for path, model in items(get(data, "models"), ("models",)):
        specs = _endpoints(data, get(model, "pool"))
        split = get(model, "split")
        if specs and not split and all(_role(spec) == "prefill" for _, spec in specs):
            yield Finding((*path, "pool"), "all endpoints of this pool prefill only; nobody would serve the model")
        dialect = dialects.DIALECTS.get(str(get(split, "dialect")))
        if specs and dialect is not None:
            yield from _once(_speaks(dialect, specs), told)
            clear = len(unnamed_models(data, get(model, "pool"))) < 2
            yield from _pairs((*path, "split"), model, dialect, specs, clear=clear)
    if not get(data, "models"):
        for path, _ in items(get(data, "pools"), ("pools",)):
            specs = _endpoints(data, path[-1])
            if specs and all(_role(spec) == "prefill" for _, spec in specs):
                yield Finding((*path, "endpoints"), "all of them prefill only, and no model says how to split")


def warnings(data: Any) -> Iterator[Finding]:
    """Endpoints with a role that nobody asks them to play."""
    splitting = {get(model, "pool") for _, model in items(get(data, "models"), ("models",)) if get(model, "split")}
    for path, _ in items(get(data, "pools"), ("pools",)):
        for at, spec in _endpoints(data, path[-1]):
            if _role(spec) == "prefill" and path[-1] not in splitting:
                yield Finding((*at, "role"), "no model of this pool has a split: nobody will ask it")
    for path, model in items(get(data, "models"), ("models",)):
        specs = _endpoints(data, get(model, "pool"))
        dialect = dialects.DIALECTS.get(str(get(get(model, "split"), "dialect")))
        if specs and dialect is not None and dialect.decode_alone and all(_role(spec) == "decode" for _, spec in specs):
            yield Finding((*path, "split"), "no endpoint of its pool prefills: requests are served whole", on_key=True)


def _once(findings: Iterator[Finding], told: set[Path]) -> Iterator[Finding]:
    """Two models of one pool need not complain twice about an endpoint."""
    for finding in findings:
        if finding.path not in told:
            told.add(finding.path)
            yield finding


def _endpoints(data: Any, pool: Any) -> Specs:
    if not isinstance(pool, str):
        return []
    return list(items(get(get(get(data, "pools"), pool), "endpoints"), ("pools", pool, "endpoints")))


def _role(spec: Mapping[str, Any]) -> str:
    return str(spec.get("role", "both"))


def _speaks(dialect: Dialect, specs: Specs) -> Iterator[Finding]:
    for path, spec in specs:
        engine = str(spec.get("engine", "vllm"))
        if engine != dialect.engine:
            at = (*path, "engine") if "engine" in spec else path
            yield Finding(
                at, f"is {engine}; the split of its pool is {dialect.name}, which only {dialect.engine} speaks"
            )
        elif dialect.needs in NEED_BOOTSTRAP and _role(spec) == "prefill" and "bootstrap" not in spec:
            yield Finding(path, f"a prefill endpoint in {dialect.name} needs bootstrap: host:port")


def unnamed_models(data: Any, pool: object) -> list[str]:
    """Return the names of a pool's models without a served_model of their own."""
    models = (model for _, model in items(get(data, "models"), ("models",)) if get(model, "pool") == pool)
    return [str(get(model, "name")) for model in models if get(model, "served_model") is None]


def _pairs(path: Path, model: Any, dialect: Dialect, specs: Specs, *, clear: bool) -> Iterator[Finding]:
    """`clear`: an endpoint's served_model can only mean this model."""
    groups: dict[str, list[str]] = {}
    name, served = str(get(model, "name")), get(model, "served_model")
    for _, spec in specs:
        labels = get(spec, "labels")
        known = served or (spec.get("served_model") if clear else None) or name
        key = compat(dialect.engine, str(known), labels if isinstance(labels, dict) else {})
        groups.setdefault(key, []).append(_role(spec))
    roles = [role for group in groups.values() for role in group]
    if "prefill" not in roles and "both" not in roles:  # decode endpoints serve whole requests then, if they can
        if not dialect.decode_alone:
            yield Finding(path, f"no endpoint of its pool prefills, and {dialect.name} decodes nothing without", True)
        return
    if not any(_fits(group) for group in groups.values()):
        text = "no two endpoints of its pool fit together: one to prefill and another to decode, with equal "
        yield Finding(path, text + "served_model and equal version and kv_dtype labels", on_key=True)


def _fits(roles: list[str]) -> bool:
    prefills, decodes, both = (roles.count(role) for role in ("prefill", "decode", "both"))
    return bool((prefills and decodes) or (both and (prefills or decodes)) or both > 1)
