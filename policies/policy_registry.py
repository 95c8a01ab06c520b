"""The routing policies by name, with the types of their parameters.

To add a policy, write a parameter struct with `build()` in builtin_policies.py or its own module,
and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

import msgspec

from policies.builtin_policies import LeastLoaded, PolicyParams, PrefixAware, RoundRobin
from policies.policy_types import Policy
from policies.pricing.endpoint_price import PricedPolicy
from policies.published.consistent_hash import ConsistentHash
from policies.published.dualmap import DualMap
from policies.published.dynamo import DynamoKv
from policies.published.llmd_blend import LlmdBlend
from policies.published.llmd_predictor import LlmdPredictor
from policies.published.llmd_token import LlmdToken
from policies.published.llumnix import Llumnix
from policies.published.lmetric import LMetric
from policies.published.mooncake import Mooncake
from policies.published.power_of_two import PowerOfTwo
from policies.published.preble import Preble
from policies.published.sglang import SglangCacheAware

T = TypeVar("T", bound=msgspec.Struct)


class PolicyConfigError(ValueError):
    """Raised if a policy's name or one of its parameters is invalid.

    param  name of the invalid parameter; None: the policy's name is unknown
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


_POLICIES: Mapping[str, type[PolicyParams]] = MappingProxyType(
    {
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "prefix_aware": PrefixAware,
        "priced": PricedPolicy,
        "power_of_two": PowerOfTwo,
        "consistent_hash": ConsistentHash,
        "sglang_cache_aware": SglangCacheAware,
        "dynamo_kv": DynamoKv,
        "llmd_blend": LlmdBlend,
        "llmd_token": LlmdToken,
        "llmd_predictor": LlmdPredictor,
        "preble": Preble,
        "mooncake": Mooncake,
        "lmetric": LMetric,
        "llumnix": Llumnix,
        "dualmap": DualMap,
    }
)


def names() -> tuple[str, ...]:
    """Return the names of all routing policies that a configuration may use."""
    return tuple(_POLICIES)


def params_type(name: str) -> type[PolicyParams]:
    """Return the type of a policy's parameters. Raises PolicyConfigError if the name is unknown."""
    if name not in _POLICIES:
        raise PolicyConfigError(
            f"unknown routing policy {name!r}{did_you_mean(name, names())}; known: "
            f"{', '.join(names())}"
        )
    return _POLICIES[name]


def build(name: str, params: Mapping[str, object]) -> Policy:
    """Build a routing policy from its name and a mapping of parameters.

    Raises PolicyConfigError for an unknown name or an invalid parameter. The message suggests a
    similar valid name if there is one.
    """
    return parse_params(name, params_type(name), params).build()


def parse_params(name: str, kind: type[T], params: Mapping[str, object]) -> T:
    """Convert a mapping of parameters to a struct of type `kind`, and return it.

    `name` is the policy's name, for error messages. Raises PolicyConfigError if the name or the
    value of a parameter is invalid.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for param, value in params.items():
        if param not in fields:
            hint = f"it takes {', '.join(fields)}" if fields else "it takes none"
            raise PolicyConfigError(
                f"{name} has no parameter {param!r}{did_you_mean(param, tuple(fields))}; {hint}",
                param,
            )
        try:
            msgspec.convert(value, fields[param])
        except msgspec.ValidationError as error:
            raise PolicyConfigError(f"{name}.{param}: {error}", param) from error
    try:
        return msgspec.convert(dict(params), kind)
    # a check of the struct itself, over several parameters
    except msgspec.ValidationError as error:
        raise PolicyConfigError(f"{name}: {error}") from error


def did_you_mean(given: str, known: tuple[str, ...]) -> str:
    """Return the text " (did you mean 'x'?)" for an error message, or "" if no known name is
    similar.
    """
    close = get_close_matches(given, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
