"""Tests that a change of few endpoints among thousands takes little time."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.config.discovery_sections import Kubernetes
from gateway.config.endpoint_sections import EndpointSpec, EndpointTraits
from gateway.fleet.discovery.kubernetes import KubernetesSource, ServiceAccount
from gateway.fleet.discovery.source_interface import DiscoveredEndpoints, specs_for

TRAITS = EndpointTraits()


def addresses(count: int) -> list[tuple[str, int]]:
    return [(f"10.0.{number // 250}.{number % 250}", 8000) for number in range(count)]


def test_only_new_endpoints_are_built_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = specs_for(addresses(1000), TRAITS)
    built: list[object] = []
    construct = EndpointSpec.model_construct

    def count(*args: Any, **values: Any) -> EndpointSpec:
        built.append(values["url"])
        return construct(*args, **values)

    monkeypatch.setattr(EndpointSpec, "model_construct", count)
    after = specs_for([*addresses(1000)[1:], ("10.1.0.1", 8000)], TRAITS, before)
    assert built == ["http://10.1.0.1:8000"]
    assert len(after) == 1000
    assert after[0] is before[1]
    assert after == specs_for([*addresses(1000)[1:], ("10.1.0.1", 8000)], TRAITS)


async def test_endpoints_of_kubernetes_are_computed_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def endpoints(self: KubernetesSource, earlier: DiscoveredEndpoints) -> DiscoveredEndpoints:
        threads.append(threading.get_ident())
        return specs_for(addresses(1), TRAITS, earlier)

    async def listed(self: KubernetesSource, http: object) -> None:
        self._version = "1"

    monkeypatch.setattr(KubernetesSource, "_endpoints", endpoints)
    monkeypatch.setattr(KubernetesSource, "_list", listed)
    account = ServiceAccount("http://127.0.0.1:1", Path("/nowhere"))
    source = KubernetesSource(Kubernetes(service="engines"), TRAITS, Random(1), account)
    watching = source.watch()
    assert len(await anext(watching)) == 1
    assert threads[0] != threading.get_ident()
    await watching.aclose()  # type: ignore[attr-defined]
