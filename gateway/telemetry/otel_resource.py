"""The OpenTelemetry resource of this process: the attributes sent with every batch of spans.

The environment variables OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override the gateway's own
attributes, as OpenTelemetry specifies. span_exporter.py sends the attributes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from urllib.parse import unquote
from uuid import uuid4

from gateway.telemetry.spans import Attribute
from gateway.util.version import program_version

log = logging.getLogger("penstock")

ATTRIBUTES, SERVICE_NAME = "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"


def resource_attributes(env: Mapping[str, str]) -> list[Attribute]:
    """Return the attributes of the OpenTelemetry resource, with overrides from `env`.

    `service.instance.id` is a new UUID unless `env` sets it.
    """
    values = {
        "service.name": "penstock",
        "service.version": program_version(),
        "service.instance.id": str(uuid4()),
    } | _from_env(env)
    if name := env.get(SERVICE_NAME):
        values["service.name"] = name
    strings = [Attribute(key, {"stringValue": value}) for key, value in values.items()]
    return [*strings, Attribute("process.pid", {"intValue": str(os.getpid())})]


def _from_env(env: Mapping[str, str]) -> dict[str, str]:
    # Return the attributes in OTEL_RESOURCE_ATTRIBUTES.
    #
    # If the variable is malformed, log a warning and return an empty dict.
    pairs: dict[str, str] = {}
    for pair in filter(str.strip, env.get(ATTRIBUTES, "").split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            log.warning(
                "the environment variable %s is ignored: it must be comma-separated "
                "KEY=VALUE pairs",
                ATTRIBUTES,
            )
            return {}
        pairs[key.strip()] = unquote(value.strip())
    pairs.pop("process.pid", None)
    return pairs
