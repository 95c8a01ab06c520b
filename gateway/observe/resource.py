"""The OpenTelemetry resource of this process: the attributes that every batch of spans carries.

The environment variables OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override the gateway's own
attributes, as OpenTelemetry specifies. Not here: what is sent, and when (export.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from urllib.parse import unquote
from uuid import uuid4

from gateway.build import own_version
from gateway.observe.spans import Attribute

log = logging.getLogger("penstock")

ATTRIBUTES, SERVICE_NAME = "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"


def attributes(env: Mapping[str, str]) -> list[Attribute]:
    """All attributes of this process.

    `service.instance.id` is a new UUID for each call unless `env` gives one.
    """
    named = {
        "service.name": "penstock",
        "service.version": own_version(),
        "service.instance.id": str(uuid4()),
    } | _given(env)
    if name := env.get(SERVICE_NAME):
        named["service.name"] = name
    shown = [Attribute(key, {"stringValue": value}) for key, value in named.items()]
    return [*shown, Attribute("process.pid", {"intValue": str(os.getpid())})]


def _given(env: Mapping[str, str]) -> dict[str, str]:
    """The pairs of OTEL_RESOURCE_ATTRIBUTES with percent-encoding decoded; {} and a warning if one is malformed.
    """
    found: dict[str, str] = {}
    for pair in filter(str.strip, env.get(ATTRIBUTES, "").split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            log.warning("%s is ignored: it must be KEY=VALUE pairs with commas between them", ATTRIBUTES)
            return {}
        found[key.strip()] = unquote(value.strip())
    found.pop("process.pid", None)
    return found
