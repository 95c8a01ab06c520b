"""Checks the models of a configuration: names, pools, names at engines, and smaller models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.config import role_rules
from gateway.config.problems import Path, did_you_mean
from gateway.config.rule_findings import (
    RuleFinding,
    find_repeated,
    get_member,
    iter_endpoints,
    iter_mappings,
)


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each model with a repeated name, or an unknown pool or smaller model.

    Also yield an error for each endpoint whose `served_model` could mean several models.
    """
    yield from _model_names(data)
    yield from _model_pools(data)
    yield from _served_models(data)
    yield from _overflows(data)


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield a warning for each endpoint's `served_model` that is unused or likely a mistake."""
    yield from _unused_names(data)
    yield from _names_to_list(data)


def _model_names(data: Any) -> Iterator[RuleFinding]:
    def names() -> Iterator[tuple[Path, str]]:
        for path, model in iter_mappings(get_member(data, "models"), ("models",)):
            if isinstance(get_member(model, "name"), str):
                yield (*path, "name"), model["name"]
            aliases = get_member(model, "aliases")
            for index, alias in enumerate(aliases if isinstance(aliases, list) else ()):
                if isinstance(alias, str):
                    yield (*path, "aliases", index), alias

    yield from find_repeated(names(), "this name")


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
        yield from find_repeated(iter(targets), "this model")


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
