"""Rules for layouts: TP sizes that an engine rejects, too many GPUs, TP across slow links.

They read plain data, like gateway/config/cross_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.config.problems import Path
from gateway.config.rule_findings import RuleFinding, get_member, iter_mappings
from gateway.config.tree import Hardware
from policies.sizing.known_models import AttentionShape, attention_shape, tp_problem

RANKS = ("tp", "pp", "dp")


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield layouts that cannot start."""
    for path, names, layout in _layouts(data):
        tp = get_member(layout, "tp")
        shape = _known_shape(names)
        if shape is not None and _is_count(tp):
            problem = tp_problem(shape, tp)
            if problem is not None:
                yield RuleFinding((*path, "tp"), f"{problem}: the engine does not start")
    yield from _too_many_gpus(data)


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield layouts that start but are probably unintended."""
    domain = get_member(get_member(data, "hardware"), "link_domain_gpus")
    domain = domain if _is_count(domain) else Hardware().link_domain_gpus
    for path, names, layout in _layouts(data):
        tp = get_member(layout, "tp")
        if not _is_count(tp):
            continue
        if tp > domain:
            text = (
                f"tp {tp} crosses link domains of {domain} GPUs, so every layer waits for the "
                "network; set hardware.link_domain_gpus if they are larger"
            )
            yield RuleFinding((*path, "tp"), text)
        elif tp & (tp - 1) and _known_shape(names) is None:
            text = (
                f"tp {tp} does not divide the attention heads of most models, "
                "and the shape of this model is unknown"
            )
            yield RuleFinding((*path, "tp"), text)


def _too_many_gpus(data: Any) -> Iterator[RuleFinding]:
    gpus = get_member(get_member(data, "hardware"), "gpus")
    used = sum(_gpus_of(layout) for _, _, layout in _layouts(data))
    if _is_count(gpus) and used > gpus:
        text = f"the layouts of all endpoints take {used} GPUs, and there are {gpus}"
        yield RuleFinding(("hardware", "gpus"), text)


def _gpus_of(layout: Any) -> int:
    total = 1
    for key in RANKS:
        size = get_member(layout, key)
        total *= size if _is_count(size) else 1
    return total


def _layouts(data: Any) -> Iterator[tuple[Path, list[str], Any]]:
    """Yield every endpoint's layout with its path and the model names it serves."""
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        names = list(_pool_models(data, path[-1]))
        for spec_path, spec in iter_mappings(get_member(pool, "endpoints"), (*path, "endpoints")):
            yield (*spec_path, "layout"), _served_names(spec, names), get_member(spec, "layout")
        discovered = get_member(get_member(pool, "discover"), "endpoint")
        if get_member(discovered, "layout") is not None:
            layout_path = (*path, "discover", "endpoint", "layout")
            yield layout_path, _served_names(discovered, names), get_member(discovered, "layout")


def _served_names(spec: Any, names: list[str]) -> list[str]:
    served = get_member(spec, "served_model")
    return [served] if isinstance(served, str) else names


def _pool_models(data: Any, pool: object) -> Iterator[str]:
    for _, model in iter_mappings(get_member(data, "models"), ("models",)):
        if get_member(model, "pool") == pool:
            names = (get_member(model, key) for key in ("served_model", "name"))
            yield from (name for name in names if isinstance(name, str))


def _known_shape(names: list[str]) -> AttentionShape | None:
    return next((shape for name in names if (shape := attention_shape(name)) is not None), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
