"""Configuration sections with which a pool chooses its routing policies and its admission policy.

The policies themselves are listed in policies/policy_registry.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from gateway.config.rule_findings import get_member
from gateway.config.value_types import Name, Section, setting
from gateway.config.yaml_source import number_if_substituted, numbers_if_substituted
from policies.default_policy import SPLIT_POLICY

SPLIT_ROLES = ("prefill", "decode")


class PolicySpec(Section):
    """The routing policy, which picks an endpoint: a name or a mapping with parameters."""

    name: Name = Field(
        description="Name of the routing policy: priced, prefix_aware, or another one in the "
        "table below."
    )
    params: Mapping[str, Annotated[Any, BeforeValidator(numbers_if_substituted)]] = Field(
        default={},
        alias="parameters",
        description="Parameters of the routing policy, by name; unknown ones are an error.",
    )


class AdmissionSpec(Section):
    """The admission policy, which admits, queues or refuses requests: a name or a mapping."""

    name: Name = Field(
        description="Name of the admission policy: none, cap, priced, or another "
        "one in the table below."
    )
    params: Mapping[str, Annotated[Any, BeforeValidator(numbers_if_substituted)]] = Field(
        default={},
        alias="parameters",
        description="Parameters of the admission policy, by name; unknown ones are an error.",
    )


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class _NameAlone:
    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(core)]}


PolicyChoice = Annotated[PolicySpec, BeforeValidator(_by_name), _NameAlone()]
AdmissionChoice = Annotated[AdmissionSpec, BeforeValidator(_by_name), _NameAlone()]


class Canary(Section):
    """A policy on trial that routes part of the requests, for comparison with the pool's own."""

    policy: PolicyChoice = Field(
        description="Name of the canary policy, or a mapping of name and parameters."
    )
    percent: (
        Annotated[float, Field(gt=0, lt=100), BeforeValidator(number_if_substituted)] | None
    ) = setting(
        None,
        "Percentage of sessions that the canary policy serves; each request without a session "
        "counts as a session of its own.",
    )
    tenants: Annotated[tuple[Name, ...], Field(max_length=256)] = setting(
        (),
        "Names of the tenants for whom the canary policy serves all requests, in place of a "
        "percentage.",
    )

    @model_validator(mode="after")
    def _has_one_selector(self) -> Canary:
        if (self.percent is None) == (not self.tenants):
            raise ValueError(
                "a canary needs exactly one of percent and tenants, to select the requests that "
                "it serves"
            )
        return self


def with_policy_of_roles(data: Any) -> Any:
    """Return a pool's configuration with SPLIT_POLICY, if it is split and names no policy.

    `data` is the pool's configuration as plain data. A pool is split if an endpoint has the role
    `prefill` or `decode`.
    """
    endpoints = get_member(data, "endpoints")
    if not isinstance(endpoints, list) or get_member(data, "policy") is not None:
        return data
    has_roles = any(get_member(endpoint, "role") in SPLIT_ROLES for endpoint in endpoints)
    return {**data, "policy": SPLIT_POLICY} if has_roles else data
