"""Tests of slow start: an endpoint that returns gets fewer concurrent requests for a while."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import msgspec

from policies.endpoint_load import NO_SOFT_CAP
from policies.health.endpoint_health import HealthEvent
from tests.unit.gateway.reload.running import running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


async def test_a_returning_endpoint_starts_with_a_low_cap_that_grows(tmp_path: Path) -> None:
    async with running(tmp_path, more="health: {interval: 60s, slow_start: 10s}\n") as harness:
        table = harness.app.gateway.endpoints
        live, other = table.all()
        table.on_event(live, HealthEvent.CONNECT_FAILED)
        assert (live.load.is_available, live.load.soft_cap) == (False, NO_SOFT_CAP)
        live.health = msgspec.structs.replace(live.health, until=0.0)  # end the back-off
        table.on_event(live, HealthEvent.PROBE_OK)
        assert (live.load.is_available, live.load.soft_cap) == (True, 3)
        began = monotonic()
        table.sweep(began + 5)
        assert live.load.soft_cap in (12, 13)
        table.sweep(began + 10.1)
        assert (live.load.soft_cap, live.slow_start_at) == (NO_SOFT_CAP, None)
        assert other.load.soft_cap == NO_SOFT_CAP


async def test_an_undrained_endpoint_starts_with_a_low_cap_too(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        table = harness.app.gateway.endpoints
        live = table.all()[0]
        table.set_drained(live, True)
        table.set_drained(live, False)
        assert live.load.soft_cap == 3
