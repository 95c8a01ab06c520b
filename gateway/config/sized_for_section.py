"""The configuration section `sized_for`: the workload for which a pool was sized."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.value_types import Section, setting

Shares = tuple[Annotated[float, Field(ge=0)], ...]


class SizedFor(Section):
    """The workload for which a pool was sized, as shares of requests by length.

    `penstock drift LOG` prints this section for the requests of an access log.
    """

    prompt: Shares = Field(
        description="Expected share of requests in each of 21 bins of prompt tokens. The bins "
        "begin at 1, 2, 4, 8, ... tokens.",
        min_length=21,
        max_length=21,
    )
    output: Shares = Field(
        description="Expected share of requests in each of 17 bins of output tokens. The bins "
        "begin at 1, 2, 4, 8, ... tokens.",
        min_length=17,
        max_length=17,
    )
    uncached: Shares = Field(
        description="Expected share of requests in each of 10 bins, by the share of the prompt "
        "that is not cached. Each bin is a tenth wide.",
        min_length=10,
        max_length=10,
    )
    turns: Shares = Field(
        description="Expected share of requests in each of 9 bins, by their turn in the session. "
        "The bins begin at turn 1, 2, 4, ...",
        min_length=9,
        max_length=9,
    )
    hourly_rates: Annotated[Shares, Field(max_length=24)] = setting(
        (),
        "Requests per second in each hour of the day, 24 numbers; if empty, rates are not "
        "compared.",
    )
