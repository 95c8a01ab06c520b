"""Tests that a failing discovery source is restarted, and that the endpoints it found stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest

from gateway.config import load_text
from gateway.config.discovery_sections import Kubernetes
from gateway.config.endpoint_sections import EndpointTraits
from gateway.fleet.discovery import discovery
from gateway.fleet.discovery.discovery import Discovery
from gateway.fleet.discovery.file_list import FileSource
from gateway.fleet.discovery.kubernetes import KubernetesSource, ServiceAccount
from gateway.fleet.discovery.source_interface import DiscoveredEndpoints, specs_for
from tests.duration_limits import PATIENCE_S

CONFIG = "version: 1\npools: {chat: {discover: {dns: 'engines:8000'}}}\n"
TRAITS = EndpointTraits()


class Failing:
    """A fake discovery source, which yields one more endpoint at each start and then raises."""

    begun = 0

    async def watch(self) -> AsyncIterator[DiscoveredEndpoints]:
        Failing.begun += 1
        yield specs_for([(f"10.0.0.{index}", 8000) for index in range(Failing.begun)], TRAITS)
        raise KeyError("the test's discovery source lacks the key metadata")


async def test_a_source_that_raises_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "AGAIN_S", 0.0)
    specs_by_pool: dict[str, DiscoveredEndpoints] = {}
    thrice = asyncio.Event()

    async def apply(change: Callable[[], None]) -> None:
        change()
        if len(specs_by_pool["chat"]) == 3:
            thrice.set()

    running = Discovery(specs_by_pool, apply, Random(1), lambda spec, rng: Failing())
    await running.start(load_text(CONFIG.encode(), "gateway.yaml", {}).config)
    async with asyncio.timeout(PATIENCE_S):
        await thrice.wait()
    await running.stop()


def slices(kind: str, *addresses: str) -> dict[str, object]:
    listed = [{"addresses": [address], "conditions": {"ready": True}} for address in addresses]
    return {"addressType": kind, "ports": [{"port": 8000}], "endpoints": listed}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(("IPv4", "IPv6"), ["http://10.0.0.1:8000"]), (("IPv6",), ["http://[fd00::1]:8000"])],
)
def test_a_pod_with_addresses_of_both_families_is_one_endpoint(
    kinds: tuple[str, ...], expected: list[str]
) -> None:
    source = KubernetesSource(
        Kubernetes(service="engines"), TRAITS, Random(1), ServiceAccount("https://api")
    )
    known = {"IPv4": slices("IPv4", "10.0.0.1"), "IPv6": slices("IPv6", "fd00::1")}
    source._slices = {kind: known[kind] for kind in kinds}
    assert [endpoint.url for endpoint in source._endpoints(())] == expected


def test_an_invalid_path_counts_as_a_missing_file() -> None:
    assert FileSource(Path("a\0b"), TRAITS)._read() is None
