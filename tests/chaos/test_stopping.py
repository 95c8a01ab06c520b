"""Tests that a gateway which is being stopped still answers requests that wait for a retry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.chaos.gateway_fleet import Answer, GatewayFleet, gateway_fleet
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

ONE_TURN: dict[str, Any] = {
    "retries": {"budget": 0, "floor": 1},
    "health": {"failures": 1000},
    "timeouts": {"shutdown": "50ms"},
    "models": [{"name": "demo-8b", "pool": "main", "resume": {}}],
}


async def stopped_while_it_waits(fleet: GatewayFleet, fault: str) -> Answer:
    # Stop a gateway while a failed request waits for the only retry permit; return its answer.
    for member in fleet.groups:
        member.faults.apply(fault)
    gate = fleet.app.gateway.gate
    assert gate.retries.try_acquire()
    asking = asyncio.create_task(fleet.ask(tokens=40))
    async with asyncio.timeout(10):
        while not fleet.metric("penstock_upstream_errors_total"):
            await asyncio.sleep(0.002)
        await fleet.app.stop()
        answer = await asking
    gate.retries.release()
    assert not gate.retries.running
    return answer


@pytest.mark.parametrize("fault", ["5xx", "reset-before-headers"])
async def test_a_request_that_waits_for_a_retry_gets_503_when_the_gateway_stops(fault: str) -> None:
    async with gateway_fleet(2, **ONE_TURN) as fleet:
        answer = await stopped_while_it_waits(fleet, fault)
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        assert answer.headers["x-should-retry"] == "true"


async def test_a_stream_that_waits_to_be_resumed_ends_with_an_error_event_when_the_gateway_stops() -> (
    None
):
    async with gateway_fleet(2, **ONE_TURN) as fleet:
        answer = await stopped_while_it_waits(fleet, "cut:after=7")
        assert answer.fate == "error_event"
        assert b'"shutting_down"' in answer.text
