"""Configuration sections for the fleet's GPUs: their number, link domains and prices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from gateway.config.value_types import Count, Label, Name, Section, setting


class LinkDomain(Section):
    """A group of GPUs that are connected by fast links such as NVLink, in a server or a rack."""

    gpus: Count = Field(
        description="Number of GPUs in this link domain; each GPU belongs to one endpoint only."
    )


class Hardware(Section):
    """The GPUs on which the endpoints run.

    `penstock check` and `penstock doctor` compare the endpoints' layouts with them.
    """

    gpus: Count | None = setting(
        None,
        "Number of GPUs in the fleet; layouts that need more are an error. Not checked by default.",
    )
    link_domain_gpus: Count = setting(
        8,
        "Number of GPUs in a link domain (connected by fast links such as NVLink): 8 in an HGX "
        "server, 72 in an NVL72 rack.",
    )
    domains: Mapping[Name, LinkDomain] = setting(
        {}, "Link domains by name, for endpoints that name theirs in layout.domains."
    )
    price_per_hour: Mapping[Label, Annotated[float, Field(gt=0)]] = setting(
        {},
        "Price in dollars per GPU and hour, by the endpoints' label gpu. With a price, the cost "
        "of requests and of idle time is counted.",
    )
