"""Model names: the name by which an endpoint's engine knows a configured model, and which endpoints
list it.

An endpoint serves a model only if its /v1/models lists the name. While that list is unknown, or if
the engine has none, the configuration decides. health_checks.py reads the lists, and
reload/snapshot.py builds routes from the result. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gateway.config import Config, Model
from policies.routing_types import Candidate, Endpoint

# The most names in a message, and the most characters of each.
MOST_NAMES = 8
MOST_CHARACTERS = 64


def explicit_models(config: Config) -> list[Model]:
    """Return the configured models; where needed, `served_model` is set to the model's name.

    An endpoint's own `served_model` applies to the one model of its pool that has none. Where
    several models have none, it could mean any of them, so each gets its own name.
    """
    unnamed = Counter(model.pool for model in config.models if model.served_model is None)
    return [
        model.model_copy(update={"served_model": model.name})
        if model.served_model is None and unnamed[model.pool] > 1
        else model
        for model in config.models
    ]


def engine_name(model: Model, endpoint: Endpoint) -> str:
    """Return the name by which an endpoint's engine knows the model.

    `model` is the client's name, from explicit_models().
    """
    return model.served_model or endpoint.served_model or model.name


def common_name(model: Model, candidates: Sequence[Candidate]) -> str:
    """Return the name by which all candidates list the model, or "" if their names differ."""
    names = {engine_name(model, candidate.endpoint) for candidate in candidates}
    names = names or {model.served_model or model.name}
    return names.pop() if len(names) == 1 else ""


def unlisted_message(model: Model, candidates: Sequence[Candidate], listed: Iterable[str]) -> str:
    """Return the error message for a configured model that no endpoint of its pool lists.

    `listed` has the names that the endpoints list, without those reserved for certain tenants.
    """
    wanted = join_names({engine_name(model, candidate.endpoint) for candidate in candidates})
    names = join_names(listed)
    listing = f"listed there: {names}" if names else "no model is listed there"
    return (
        f"No endpoint of pool '{model.pool}' lists {wanted} for the model '{model.name}'; "
        f"{listing}."
    )


def join_names(names: Iterable[str]) -> str:
    """Return names as text for a message: sorted, quoted, and shortened if there are many."""
    return ", ".join(_shorten(sorted(set(names))))


def _shorten(names: Sequence[str]) -> Iterator[str]:
    for name in names[:MOST_NAMES]:
        yield f"'{name[:MOST_CHARACTERS]}'"
    if len(names) > MOST_NAMES:
        yield f"and {len(names) - MOST_NAMES} more"
