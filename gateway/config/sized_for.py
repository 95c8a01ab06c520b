"""The configuration section `sized_for`: the workload that a pool was sized for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.values import Section, setting

Shares = tuple[Annotated[float, Field(ge=0)], ...]


class SizedFor(Section):
    """The workload that a pool was sized for: shares of requests by length, as `penstock drift LOG`
    prints.
    """

    prompt: Shares = Field(
        description="Shares of requests by prompt tokens, in 21 bins from 1, 2, 4, 8, ... on.",
        min_length=21,
        max_length=21,
    )
    output: Shares = Field(
        description="Shares of requests by output tokens, in 17 bins from 1, 2, 4, 8, ... on.",
        min_length=17,
        max_length=17,
    )
    uncached: Shares = Field(
        description="Shares of requests by uncached share of the prompt, in 10 bins of a tenth.",
        min_length=10,
        max_length=10,
    )
    turns: Shares = Field(
        description="Shares of requests by turn of their session, in 9 bins from 1, 2, 4, ... on.",
        min_length=9,
        max_length=9,
    )
    hourly_rates: Annotated[Shares, Field(max_length=24)] = setting(
        (), "Requests per second by hour of the day, 24 numbers; if empty, rates are not compared."
    )
