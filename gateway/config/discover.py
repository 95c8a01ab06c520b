"""Where a pool's further endpoints are found, as a section of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from gateway.config.values import Section, setting

DnsLabel = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)
]


class Kubernetes(Section):
    """A Service whose ready endpoints are asked. The pod's service account lists and watches its EndpointSlices."""

    service: DnsLabel = Field(description="Name of the Service.")
    namespace: DnsLabel | None = setting(None, "Its namespace; the pod's own unless given.")
    port: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,15}$")] | None = setting(
        None, "Name or number (in quotes) of the port; the first one unless given."
    )
