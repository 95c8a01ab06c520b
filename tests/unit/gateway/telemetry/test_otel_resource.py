"""Tests of the OpenTelemetry resource, which identifies a process.

Environment variables have precedence.
"""

from __future__ import annotations

import os

import pytest

from gateway.telemetry.otel_resource import resource_attributes
from gateway.util.version import program_version


def named(env: dict[str, str]) -> dict[str, object]:
    return {
        attribute.key: next(iter(attribute.value.values()))
        for attribute in resource_attributes(env)
    }


def test_each_process_has_its_own_instance_id() -> None:
    one, other = named({}), named({})
    assert one["service.instance.id"] != other["service.instance.id"]
    assert (one["service.name"], one["service.version"]) == ("penstock", program_version())
    assert resource_attributes({})[-1].value == {"intValue": str(os.getpid())}


def test_the_environment_adds_attributes_and_replaces_the_gateways_own() -> None:
    result = named(
        {
            "OTEL_RESOURCE_ATTRIBUTES": " k8s.pod.name = gw-0, team=a%2Cb%20c,service.instance.id=gw-0,service.name=x,",
            "OTEL_SERVICE_NAME": "router",
        }
    )
    assert result["k8s.pod.name"] == "gw-0"
    assert result["team"] == "a,b c"
    assert (result["service.instance.id"], result["service.name"]) == ("gw-0", "router")
    assert (
        named({"OTEL_RESOURCE_ATTRIBUTES": "service.name=x", "OTEL_SERVICE_NAME": ""})[
            "service.name"
        ]
        == "x"
    )


@pytest.mark.parametrize("value", ["team", "a=1,=2", "a=1,team"])
def test_attributes_that_are_malformed_are_ignored_as_a_whole_with_a_warning(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert named({"OTEL_RESOURCE_ATTRIBUTES": value}).keys() == named({}).keys()
    assert "OTEL_RESOURCE_ATTRIBUTES is ignored" in caplog.text


def test_the_process_id_cannot_be_replaced() -> None:
    assert named({"OTEL_RESOURCE_ATTRIBUTES": "process.pid=1"})["process.pid"] == str(os.getpid())
