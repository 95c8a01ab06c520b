"""A returning endpoint gets fewer concurrent requests for a while."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import msgspec

from policies.health.health import Event
from policies.load import NO_CEILING
from tests.unit.gateway.reload.running import running


async def test_a_returning_endpoint_starts_with_a_low_cap_that_grows(tmp_path: Path) -> None:
    async with running(tmp_path, more="health: {interval: 60s, slow_start: 10s}\n") as harness:
        table = harness.app.gateway.endpoints
        live, other = table.all()
        table.happened(live, Event.CONNECT_FAILED)
        assert (live.load.available, live.load.ceiling) == (False, NO_CEILING)
        live.health = msgspec.structs.replace(live.health, until=0.0)  # its back-off is over
        table.happened(live, Event.PROBE_OK)
        assert (live.load.available, live.load.ceiling) == (True, 3)
        began = monotonic()
        table.sweep(began + 5)
        assert live.load.ceiling in (12, 13)
        table.sweep(began + 10.1)
        assert (live.load.ceiling, live.warm_from) == (NO_CEILING, None)
        assert other.load.ceiling == NO_CEILING


async def test_an_undrained_endpoint_starts_with_a_low_cap_too(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        table = harness.app.gateway.endpoints
        live = table.all()[0]
        table.drain(live, True)
        table.drain(live, False)
        assert live.load.ceiling == 3
