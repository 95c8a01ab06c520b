"""The configuration section of a mirror, which compares live answers with other engines'."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from gateway.config.values import Count, Name, Section, setting
from gateway.config.yaml_source import number_if_substituted


class Mirror(Section):
    """A share of live requests that is also sent to a candidate pool, to compare the answers.

    Off the request path, at temperature 0, and within a budget. Clients never see it.
    """

    to: Name = Field(
        description="Pool of the candidate engines; without models of its own it gets no requests "
        "of clients."
    )
    percent: Annotated[float, Field(gt=0, le=100), BeforeValidator(number_if_substituted)] = Field(
        description="Percentage of sessions whose requests are compared, as far as the budget "
        "allows. With workers, of those of the first worker process."
    )
    tokens_per_minute: Count = setting(
        20_000,
        "Tokens that all copies together may take per minute, prompts and answers. Each request is "
        "sent three times: to its own engine twice, and to the candidate.",
    )
    in_flight: Annotated[Count, Field(le=64)] = setting(
        2, "Number of requests that may be compared or wait for their own end at once."
    )
    max_tokens: Annotated[Count, Field(le=4096)] = setting(
        128, "Maximum number of tokens of a compared answer."
    )
    models: Annotated[tuple[Name, ...], Field(max_length=64)] = setting(
        (), "Models whose requests are compared; all models of the pool by default."
    )
    model: Name | None = setting(
        None, "Name of the model at the candidate engines; by default the one they list."
    )
