"""Sections of the configuration about prices of tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.values import Section, setting

Dollars = Annotated[float, Field(ge=0)]


class TokenPriceSpec(Section):
    """What a provider charges, in dollars per million tokens."""

    prompt: Dollars = Field(description="Dollars per million prompt tokens.")
    cached: Dollars | None = setting(
        None,
        "Dollars per million prompt tokens that the provider reports as cached; as prompt tokens "
        "by default.",
    )
    answer: Dollars = Field(description="Dollars per million tokens of answers.")
