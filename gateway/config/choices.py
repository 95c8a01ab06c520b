"""What a pool chooses by name: its policy, those tried beside it, and its admission.

Lives here: these sections of the configuration. Not here: the policies themselves (policies/registry.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from gateway.config.source import number_if_substituted, numbers_if_substituted
from gateway.config.values import Name, Section, setting


class PolicySpec(Section):
    """Who serves a request: a policy by name, alone or with parameters."""

    name: Name = Field(description="prefix_aware, priced, or another of the table below.")
    params: Mapping[str, Annotated[Any, BeforeValidator(numbers_if_substituted)]] = Field(
        default={},
        alias="parameters",
        description="The policy's own parameters; unknown ones are refused.",
    )


class AdmissionSpec(Section):
    """Who may enter, wait, or is refused: an admission by name, alone or with parameters."""

    name: Name = Field(description="none, cap, priced, or another of the table below.")
    params: Mapping[str, Annotated[Any, BeforeValidator(numbers_if_substituted)]] = Field(
        default={},
        alias="parameters",
        description="The admission's own parameters; unknown ones are refused.",
    )


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class _NameAlone:
    """Tells the schema that the name alone will do where the mapping would."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(core)]}


PolicyChoice = Annotated[PolicySpec, BeforeValidator(_by_name), _NameAlone()]
AdmissionChoice = Annotated[AdmissionSpec, BeforeValidator(_by_name), _NameAlone()]


class Canary(Section):
    """A policy that serves a part of the pool's requests, beside the one that serves the rest."""

    policy: PolicyChoice = Field(
        description="The policy's name, or a mapping of name and parameters."
    )
    percent: (
        Annotated[float, Field(gt=0, lt=100), BeforeValidator(number_if_substituted)] | None
    ) = setting(
        None,
        "How many in a hundred sessions it serves; a request without a session is one of its own.",
    )
    tenants: Annotated[tuple[Name, ...], Field(max_length=256)] = setting(
        (), "Or whose requests, all of them."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Canary:
        if (self.percent is None) == (not self.tenants):
            raise ValueError("needs either percent or tenants: which requests it serves")
        return self
