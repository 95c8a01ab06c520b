"""Configuration sections for service discovery: where to find the endpoints of a pool."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from gateway.config.values import Section, setting

DnsLabel = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)
]


class Kubernetes(Section):
    """A Kubernetes Service whose ready endpoints are added to the pool.

    The service account of the gateway's pod needs the permissions `list` and `watch` for the
    Service's EndpointSlices.
    """

    service: DnsLabel = Field(description="Name of the Kubernetes Service.")
    namespace: DnsLabel | None = setting(
        None, "Namespace of the Kubernetes Service; by default that of the gateway's own pod."
    )
    port: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,15}$")] | None = setting(
        None, "Name, or number in quotes, of the Service's port; by default its first port."
    )
