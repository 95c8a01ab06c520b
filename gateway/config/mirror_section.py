"""The configuration section `mirror`: copies live requests to other engines, to compare answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from gateway.config.value_types import Count, Name, Section, setting
from gateway.config.yaml_source import number_if_substituted


class Mirror(Section):
    """A share of live requests that is also sent to a candidate pool, to compare the answers.

    A copy is sent after the client has its answer, at temperature 0 and within a token budget.
    Clients never see the answer to a copy.
    """

    to: Name = Field(
        description="Name of the pool with the candidate engines. Without models of its own, it "
        "gets no requests from clients."
    )
    percent: Annotated[float, Field(gt=0, le=100), BeforeValidator(number_if_substituted)] = Field(
        description="Percentage of sessions whose requests are compared, as far as the token "
        "budget allows. With several workers, only the first worker process compares."
    )
    tokens_per_minute: Count = setting(
        20_000,
        "Maximum number of tokens (prompts and answers) per minute of all copies together. Each "
        "request is sent three times: twice to its own engine, and once to the candidate.",
    )
    in_flight: Annotated[Count, Field(le=64)] = setting(
        2,
        "Maximum number of requests that are being compared, or that wait for their own answer "
        "to end.",
    )
    max_tokens: Annotated[Count, Field(le=4096)] = setting(
        128, "Maximum number of tokens in each compared answer."
    )
    models: Annotated[tuple[Name, ...], Field(max_length=64)] = setting(
        (), "Names of the models whose requests are compared; by default all models of the pool."
    )
    model: Name | None = setting(
        None, "Name of the model at the candidate engines; by default the name that they list."
    )
