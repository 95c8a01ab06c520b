"""Configuration section for the prices of a provider's tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.value_types import Section, setting

Dollars = Annotated[float, Field(ge=0)]


class TokenPriceSpec(Section):
    """What a provider charges for tokens, in dollars per million tokens."""

    prompt: Dollars = Field(description="Price of uncached prompt tokens, in dollars per million.")
    cached: Dollars | None = setting(
        None,
        "Price of prompt tokens that the provider reports as cached, in dollars per million; by "
        "default that of uncached ones.",
    )
    answer: Dollars = Field(description="Price of response tokens, in dollars per million.")
