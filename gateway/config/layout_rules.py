"""Checks GPU layouts and the total number of GPUs in a configuration.

The rules are in policies/sizing/parallelism_rules.py. The checks read plain data, like those of
gateway/config/cross_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.config.hardware_section import Hardware
from gateway.config.problems import Path
from gateway.config.rule_findings import RuleFinding, get_member, iter_mappings
from policies.sizing.gpu_memory import Demand, MemoryCheck, check_memory
from policies.sizing.gpus import GPUS
from policies.sizing.layout_facts import ModelFacts, facts_of_name
from policies.sizing.model_shapes import MODELS
from policies.sizing.parallel_layout import Layout
from policies.sizing.parallelism_rules import PlannedGroup, layout_findings
from policies.sizing.placement import PlacedGroup, placement_problems

SIZES = ("tp", "pp", "ep", "dp")


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each GPU layout with which an engine cannot start."""
    yield from _findings(data, is_error=True)
    yield from _too_many_gpus(data)
    yield from _misplaced(data)


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield a warning for each GPU layout that works but is probably a mistake."""
    yield from _findings(data, is_error=False)


def _findings(data: Any, is_error: bool) -> Iterator[RuleFinding]:
    domain = get_member(get_member(data, "hardware"), "link_domain_gpus")
    domain = domain if _is_count(domain) else Hardware().link_domain_gpus
    sizes = _domain_sizes(data)
    for path, names, spec in _endpoints(data):
        layout = _layout(get_member(spec, "layout"))
        if layout is not None:
            own = [sizes[name] for name in _domains(spec) if name in sizes]
            widest = min(own, default=domain)
            group = _group(spec, names, layout, widest, _context(data, path, spec))
            for finding in layout_findings(group):
                if finding.is_error is is_error:
                    yield RuleFinding((*path, "layout", finding.member), finding.text)


def _group(
    spec: Any, names: list[str], layout: Layout, domain: int, context: int | None
) -> PlannedGroup:
    engine, cap = get_member(spec, "engine"), get_member(spec, "max_concurrency")
    # Requests are rarely as long as the model allows, but often as long as a tier of context does.
    has_tier = _is_count(get_member(spec, "context_tokens"))
    label = get_member(get_member(spec, "labels"), "gpu")
    gpu = GPUS.get(label.lower()) if isinstance(label, str) else None
    return PlannedGroup(
        layout,
        _known_facts(names),
        engine=engine if isinstance(engine, str) else "vllm",
        domain=domain,
        has_fast_link=gpu is None or gpu.has_fast_link,
        memory=_memory(names, gpu.name if gpu else "", layout, context),
        max_concurrency=cap if _is_count(cap) and has_tier else None,
    )


def _memory(names: list[str], gpu: str, layout: Layout, context: int | None) -> MemoryCheck | None:
    model = next((MODELS[name.lower()] for name in names if name.lower() in MODELS), None)
    if model is None or gpu not in GPUS:
        return None
    return check_memory(model, GPUS[gpu], layout, Demand(context or 1))


def _misplaced(data: Any) -> Iterator[RuleFinding]:
    paths, groups = [], []
    for path, _, spec in _endpoints(data):
        layout, domains = _layout(get_member(spec, "layout")), _domains(spec)
        if layout is not None and domains:
            paths.append((*path, "layout", "domains"))
            groups.append(PlacedGroup(layout, domains))
    for index, text in placement_problems(_domain_sizes(data), groups):
        yield RuleFinding(paths[index], text)


def _domains(spec: Any) -> list[str]:
    names = get_member(get_member(spec, "layout"), "domains")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _domain_sizes(data: Any) -> dict[str, int]:
    # Return the GPUs of each link domain, without those whose number is invalid.
    domains = get_member(get_member(data, "hardware"), "domains")
    pairs = domains.items() if isinstance(domains, dict) else ()
    sizes = {str(name): get_member(section, "gpus") for name, section in pairs}
    return {name: gpus for name, gpus in sizes.items() if _is_count(gpus)}


def _too_many_gpus(data: Any) -> Iterator[RuleFinding]:
    gpus = get_member(get_member(data, "hardware"), "gpus")
    layouts = (_layout(get_member(spec, "layout")) for _, _, spec in _endpoints(data))
    used = sum(1 if layout is None else layout.gpus for layout in layouts)
    if _is_count(gpus) and used > gpus:
        text = f"the layouts of all endpoints take {used} GPUs, and there are {gpus}"
        yield RuleFinding(("hardware", "gpus"), text)


def _endpoints(data: Any) -> Iterator[tuple[Path, list[str], Any]]:
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        names = list(_pool_models(data, path[-1]))
        for spec_path, spec in iter_mappings(get_member(pool, "endpoints"), (*path, "endpoints")):
            yield spec_path, _served_names(spec, names), spec
        discovered = get_member(get_member(pool, "discover"), "endpoint")
        if get_member(discovered, "layout") is not None:
            index = (*path, "discover", "endpoint")
            yield index, _served_names(discovered, names), discovered


def _layout(layout: Any) -> Layout | None:
    # Return the layout that a section describes, or None if one of its sizes is invalid.
    sizes = [get_member(layout, key) for key in SIZES]
    if any(size is not None and not _is_count(size) for size in sizes):
        return None
    return Layout(*(size or 1 for size in sizes))


def _context(data: Any, path: Path, spec: Any) -> int | None:
    # Return the longest request of an endpoint in tokens: its own limit, or its pool's longest.
    #
    # The result is None if no limit is configured.
    own = get_member(spec, "context_tokens")
    if _is_count(own):
        return int(own)
    lengths = [
        get_member(model, "context_tokens")
        for _, model in iter_mappings(get_member(data, "models"), ("models",))
        if get_member(model, "pool") == path[1]
    ]
    return max(filter(_is_count, lengths), default=None)


def _served_names(spec: Any, names: list[str]) -> list[str]:
    served = get_member(spec, "served_model")
    return [served] if isinstance(served, str) else names


def _pool_models(data: Any, pool: object) -> Iterator[str]:
    for _, model in iter_mappings(get_member(data, "models"), ("models",)):
        if get_member(model, "pool") == pool:
            names = (get_member(model, key) for key in ("served_model", "name"))
            yield from (name for name in names if isinstance(name, str))


def _known_facts(names: list[str]) -> ModelFacts | None:
    return next((facts for name in names if (facts := facts_of_name(name)) is not None), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
