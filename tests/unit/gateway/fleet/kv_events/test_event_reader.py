"""Tests of the reader of KV events (reports of cached blocks): many engines, and failing ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gateway.config.kv_event_sections import KvEvents
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.kv_events.event_reader import KvEventReader
from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes
from gateway.metrics.catalogue import Metrics
from policies.routing_types import EngineKind
from tests.duration_limits import within
from tests.replacement import stand_in

pytest.importorskip("zmq")


class Live:
    """A fake endpoint with only the members that the reader of KV events uses."""

    is_leaving = False

    def __init__(self, slot: int, publisher: str, ranks: int = 1) -> None:
        events = KvEvents.model_construct(publisher=publisher, replay=publisher, topic="")
        self.spec = SimpleNamespace(kv_events=events, url="http://127.0.0.1:1")
        self.load = SimpleNamespace(slot=slot, kv_tokens=None)
        layout = SimpleNamespace(dp=ranks)
        self.endpoint = SimpleNamespace(
            name=f"engine-{slot}", layout=layout, rank=None, engine=EngineKind.VLLM
        )


async def states(*lives: Live) -> list[str | None]:
    # Start a reader of these endpoints' events, and return what it says of each.
    exact = ExactPrefixes(1 << 20)
    table = stand_in(EndpointTable, SimpleNamespace(all=lambda: lives))
    reader = KvEventReader(table, exact, Metrics())
    reader.start()

    async def until_subscribed() -> None:
        while not all(live.load.slot in exact.endpoints for live in lives):
            await asyncio.sleep(0.001)

    try:
        await within(10.0, until_subscribed())
        return [exact.describe(live.load.slot, 0.0) for live in lives]
    finally:
        await reader.stop()


async def test_an_address_that_is_refused_is_named_and_other_endpoints_are_read() -> None:
    bad, good = await states(Live(0, "bad host:5557"), Live(1, "127.0.0.1:9"))
    assert bad == (
        "believed: cannot subscribe to tcp://bad host:5557: Invalid argument "
        "(addr='tcp://bad host:5557')"
    )
    assert good == "believed: not connected"


async def test_more_sources_are_read_than_zeromq_has_sockets_for_by_default() -> None:
    (state,) = await states(Live(0, "127.0.0.1:9", ranks=400))
    assert state == "believed: rank 0: not connected"
