"""Generates policy parameters at the limits of their types. Policies must work with all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from policies.policy_registry import PolicyConfigError

T = TypeVar("T")


def edges(kind: inspect.Type, rng: Random) -> list[Any]:
    # Return the minimum and maximum of a numeric type, or all values of another type.
    #
    # Raises AssertionError for a number without both limits.
    match kind:
        case inspect.FloatType() | inspect.IntType():
            assert kind.ge is not None, f"{kind} has no least"
            assert kind.le is not None, f"{kind} has no most"
            return [kind.ge, kind.le]
        case inspect.UnionType():
            return [value for member_type in kind.types for value in edges(member_type, rng)]
        case inspect.DictType():
            return [{"tenant": value, "other": 1.0} for value in edges(kind.value_type, rng)]
        case inspect.LiteralType():
            return list(kind.values)
        case inspect.NoneType():
            return [None]
        case inspect.StructType():
            return [parameters(kind.cls, rng)]
    raise AssertionError(
        f"no extreme values are defined for policy parameters of the type {kind}; add them here"
    )


def parameters(kind: type[msgspec.Struct], rng: Random) -> dict[str, Any]:
    # Return parameters with a random choice of limit values; some are left at their defaults.
    result = {
        field.name: edges(inspect.type_info(field.type), rng)
        for field in msgspec.structs.fields(kind)
    }
    return {name: rng.choice(values) for name, values in result.items() if rng.random() < 0.5}


def builds(
    build: Callable[[str, Mapping[str, object]], T], name: str, kind: type[msgspec.Struct]
) -> list[T]:
    # Build about a dozen objects with random limit values.
    #
    # Combinations that the builder rejects are skipped, because some rules cover several
    # parameters.
    built, rng = list[T](), Random(name)
    for _ in range(2000):
        with suppress(PolicyConfigError):
            built.append(build(name, parameters(kind, rng)))
        if len(built) == 12:
            return built
    raise AssertionError(
        f"the parameter type {name} accepts too few of the generated values: {len(built)} of 2000"
    )
