"""Configuration sections for service classes: their latency targets, and the default class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from gateway.config.value_types import Duration, Name, Section, Weight, setting


class SloClass(Section):
    """A service class: latency targets of a request, and its value if they are met."""

    ttft: Duration = Field(
        description="Target for the time to first token, measured from the arrival of the "
        "complete request."
    )
    tpot: Duration = Field(description="Target for the mean time per output token after the first.")
    weight: Weight = setting(
        1.0, "Worth of a request of this class that meets its targets, relative to other classes."
    )


class Slos(Section):
    """The service classes of requests, and the default class.

    A request gets the first of these classes that is set: the class in its header x-slo-class, its
    tenant's class, its model's class, the default class.
    """

    default: Name = setting(
        "standard", "Name of the class of requests for which no other one is given."
    )
    classes: Annotated[Mapping[Name, SloClass], Field(min_length=1, max_length=32)] = setting(
        {
            "interactive": {"ttft": "1s", "tpot": "50ms", "weight": 4.0},
            "standard": {"ttft": "5s", "tpot": "100ms"},
            "batch": {"ttft": "60s", "tpot": "500ms", "weight": 0.25},
        },
        "Service classes by name. They replace the three built-in classes.",
    )
