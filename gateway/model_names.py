"""Model names: what an endpoint's engine calls a configured model, and which endpoints list it.

An endpoint serves a model only if its /v1/models lists the name. Until that list is known, or if the engine has none,
the configuration decides. Pure; watch/watcher.py reads the lists, snapshot.py builds routes from the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gateway.config import Config, Model
from policies.model import Candidate, Endpoint

MOST_NAMES = 8  # in a message
MOST_CHARACTERS = 64  # of each


def explicit_models(config: Config) -> list[Model]:
    """Return the configured models, with served_model set where an endpoint's served_model cannot stand for them.

    It stands for the only model of its pool that has none of its own.
    """
    unnamed = Counter(model.pool for model in config.models if model.served_model is None)
    return [
        model.model_copy(update={"served_model": model.name})
        if model.served_model is None and unnamed[model.pool] > 1
        else model
        for model in config.models
    ]


def engine_name(model: Model, endpoint: Endpoint) -> str:
    """Return the name that requests for the model carry to the endpoint. `model` is one of explicit_models()."""
    return model.served_model or endpoint.served_model or model.name


def common_name(model: Model, candidates: Sequence[Candidate]) -> str:
    """Return the name that all candidates know the model by; "" if they differ."""
    names = {engine_name(model, each.endpoint) for each in candidates} or {
        model.served_model or model.name
    }
    return names.pop() if len(names) == 1 else ""


def unlisted_message(model: Model, candidates: Sequence[Candidate], listed: Iterable[str]) -> str:
    """Return what a client reads who asks for a model that no endpoint lists.

    `listed` are the names that the endpoints list, without those of endpoints reserved for tenants.
    """
    wanted = shown_names({engine_name(model, each.endpoint) for each in candidates})
    names = shown_names(listed)
    served = f"listed there: {names}" if names else "no model is listed there"
    return (
        f"No endpoint of pool '{model.pool}' lists {wanted} for the model '{model.name}'; {served}."
    )


def shown_names(names: Iterable[str]) -> str:
    """Return names for a message, sorted and cut."""
    return ", ".join(_shown(sorted(set(names))))


def _shown(names: Sequence[str]) -> Iterator[str]:
    for name in names[:MOST_NAMES]:
        yield f"'{name[:MOST_CHARACTERS]}'"
    if len(names) > MOST_NAMES:
        yield f"and {len(names) - MOST_NAMES} more"
