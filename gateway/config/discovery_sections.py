"""Configuration sections for service discovery: where to find the endpoints of a pool."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from gateway.config.endpoint_sections import EndpointTraits
from gateway.config.value_types import Bootstrap, Interval, Section, setting

DnsLabel = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)
]


class Kubernetes(Section):
    """A Kubernetes Service whose ready endpoints are added to the pool.

    The service account of the gateway's pod needs the permissions `list` and `watch` for the
    Service's EndpointSlices.
    """

    service: DnsLabel = Field(
        description="Name of the Kubernetes Service that selects the engines."
    )
    namespace: DnsLabel | None = setting(
        None, "Namespace of the Kubernetes Service; by default that of the gateway's own pod."
    )
    port: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,15}$")] | None = setting(
        None, "Name, or number in quotes, of the Service's port; by default its first port."
    )


class Discover(Section):
    """How the endpoints of a pool are discovered: exactly one of dns, file and kubernetes."""

    dns: Bootstrap | None = setting(
        None, "DNS name:port; every address that the name resolves to is an endpoint."
    )
    file: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None,
        "Path of a YAML or JSON file with a list of URLs, or of mappings as under endpoints. A "
        "relative path starts at the configuration's folder. The gateway notices changes of the "
        "file.",
    )
    kubernetes: Kubernetes | None = setting(
        None, "Kubernetes Service whose ready endpoints join the pool."
    )
    interval: Interval = setting("10s", "Time between two DNS queries, varied randomly.")
    endpoint: EndpointTraits = setting(
        {}, "Settings of each discovered endpoint, as under endpoints."
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> Discover:
        if sum(source is not None for source in (self.dns, self.file, self.kubernetes)) != 1:
            raise ValueError("discover needs exactly one of dns, file and kubernetes")
        bootstrap = self.endpoint.bootstrap
        if self.file is None and bootstrap is not None and not bootstrap.startswith(":"):
            port = bootstrap.rpartition(":")[2]
            raise ValueError(
                f"endpoint.bootstrap names one host for all discovered endpoints; write ':{port}' "
                "to use this port on each endpoint's own host"
            )
        return self
