"""Decides which endpoints serve a model, and by which name their engines know it. No I/O.

An endpoint serves a model only if its page /v1/models lists the name that the engine has for the
model. Without that list, the configuration decides. model_list_reader.py reads the lists, and
reload/snapshot_plan.py builds routes from these decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gateway.config import Config, Model
from gateway.fleet.endpoint_registry import RegistryPlan
from policies.routing_types import Candidate, Endpoint

# The most names in a message, and the most characters of each.
MOST_NAMES = 8
MOST_CHARACTERS = 64


def explicit_models(config: Config) -> list[Model]:
    """Return the configured models; fill in `served_model`, the engines' name, where it is needed.

    An endpoint's setting `served_model` can name only one model of its pool. If several models of a
    pool have no `served_model` of their own, their `name` becomes their `served_model`.
    """
    unnamed = Counter(model.pool for model in config.models if model.served_model is None)
    return [
        model.model_copy(update={"served_model": model.name})
        if model.served_model is None and unnamed[model.pool] > 1
        else model
        for model in config.models
    ]


def serving_endpoints(
    plan: RegistryPlan, model: Model, candidates: tuple[Candidate, ...]
) -> tuple[Candidate, ...]:
    """Return the candidates that may serve a model.

    A candidate may serve a configured model if its engine lists the model's name, or has sent no
    list of models. In a configuration without models, only engines that list the model serve it; if
    none does, the result is the candidates whose first list has not arrived.
    """
    lives, is_configured = plan.live_by_load, bool(plan.config.models)
    listing = []
    for candidate in candidates:
        live = lives[id(candidate.load)]
        is_unknown = is_configured and not live.has_list
        if is_unknown or engine_name(model, candidate.endpoint) in live.models:
            listing.append(candidate)
    if listing or is_configured:
        return tuple(listing)
    return tuple(each for each in candidates if lives[id(each.load)].may_list_models)


def listed_models(plan: RegistryPlan, served: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the (pool, name) of each model that engines list, for a configuration without models.

    served  the (pool, name) of the models that are served now. A model that no engine lists any
            more stays while a new engine of its pool may list it
    """
    listed = dict.fromkeys(
        (member.endpoint.pool, name) for member in plan.members for name in member.live.models
    )
    names = {name for _, name in listed}
    awaiting = {member.endpoint.pool for member in plan.members if member.live.may_list_models}
    kept = [model for model in served if model[0] in awaiting and model[1] not in names]
    return [*listed, *kept]


def public_names(plan: RegistryPlan, pool: str) -> list[str]:
    """Return the names of the models that the engines of a pool list, sorted.

    Endpoints that are reserved for certain tenants are left out.
    """
    public = [
        member.live
        for member in plan.members
        if member.endpoint.pool == pool and not member.endpoint.tenants
    ]
    return sorted({name for live in public if live.has_list for name in live.models})


def engine_name(model: Model, endpoint: Endpoint) -> str:
    """Return the name by which an endpoint's engine knows the model.

    `model` comes from explicit_models(); `model.name` is the name that clients use.
    """
    return model.served_model or endpoint.served_model or model.name


def common_name(model: Model, candidates: Sequence[Candidate]) -> str:
    """Return the name by which all these engines know the model; "" if their names differ."""
    names = {engine_name(model, candidate.endpoint) for candidate in candidates}
    names = names or {model.served_model or model.name}
    return names.pop() if len(names) == 1 else ""


def unlisted_message(model: Model, candidates: Sequence[Candidate], listed: Iterable[str]) -> str:
    """Return the error message for a configured model that no endpoint of its pool lists.

    `listed` has the names that the endpoints do list, except endpoints for certain tenants.
    """
    wanted = join_names({engine_name(model, candidate.endpoint) for candidate in candidates})
    names = join_names(listed)
    listing = f"listed there: {names}" if names else "no model is listed there"
    return (
        f"No endpoint of pool '{model.pool}' lists {wanted} for the model '{model.name}'; "
        f"{listing}."
    )


def join_names(names: Iterable[str]) -> str:
    """Join names for a message: sorted, quoted, and cut if there are many."""
    return ", ".join(_shorten(sorted(set(names))))


def _shorten(names: Sequence[str]) -> Iterator[str]:
    for name in names[:MOST_NAMES]:
        yield f"'{name[:MOST_CHARACTERS]}'"
    if len(names) > MOST_NAMES:
        yield f"and {len(names) - MOST_NAMES} more"
