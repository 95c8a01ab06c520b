"""Configuration sections for timeouts, retries and hedges of requests to engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from gateway.config.value_types import Duration, Section, setting
from gateway.config.yaml_source import number_if_substituted


class Timeouts(Section):
    """Timeouts: how long the gateway waits for an engine, and for requests when it stops."""

    connect: Duration = setting(
        "1s",
        "Maximum time to connect to an engine. If no address of its host name is known yet, "
        "finding one may take as long before.",
    )
    first_byte: Duration = setting(
        "600s",
        "Maximum time from sending a request to an engine to the first byte of its response.",
    )
    stall: Duration = setting("60s", "Maximum time between two chunks of an engine's response.")
    grace: Duration | None = setting(
        None,
        "Time after SIGTERM in which /readyz reports draining and requests are still accepted, so "
        "that a load balancer can notice. None by default.",
    )
    handover: Duration = setting(
        "1h", "Maximum time for the running requests of a process that a restart has replaced."
    )
    shutdown: Duration = setting(
        "30s",
        "Maximum time for running requests to end after drain_delay. A stream that is still "
        "running then ends with an error event.",
    )


class Retries(Section):
    """Settings for retries of requests that fail before the first byte of their answer."""

    budget: Annotated[float, Field(ge=0, le=1)] = setting(
        0.2,
        "Maximum number of concurrent retries, as a share of the requests in progress in this "
        "gateway.",
    )
    floor: Annotated[
        int, Field(strict=True, ge=0, le=1000), BeforeValidator(number_if_substituted)
    ] = setting(
        3,
        "Number of concurrent retries allowed in addition to that share, so that a gateway with "
        "few requests can retry.",
    )
    hedge: Annotated[float, Field(ge=0, le=0.2)] = setting(
        0.05,
        "Maximum share of requests that are also sent to a second endpoint when their first byte "
        "is late. The first response wins. These requests count towards the retry budget. 0 turns "
        "this off.",
    )
    attempts: Annotated[
        int, Field(strict=True, ge=1, le=16), BeforeValidator(number_if_substituted)
    ] = setting(
        3,
        "Maximum number of endpoints that one request is sent to. Endpoints that refuse the "
        "connection or fail the health check before a retry do not count.",
    )
