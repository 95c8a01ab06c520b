"""Tests of measuring how late the event loop runs its callbacks (the loop's lag)."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.connection_limits import ClientConnections
from tests.replacement import replace_method
from tests.unit.gateway.disagg.scripted_engines import decodes, prefills, split_gateway
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


async def test_ending_many_connections_over_several_iterations_is_no_lag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweeps = 0

    async def sweeps_slowly(*_: object) -> None:
        nonlocal sweeps
        sweeps += 1
        await asyncio.sleep(1.0)

    replace_method(monkeypatch, ClientConnections, "sweep", sweeps_slowly)
    async with split_gateway("vllm_nixl", [prefills()], [decodes]) as f:
        await asyncio.sleep(10.0)
        assert sweeps >= 5
        assert f.metric("penstock_loop_lag_seconds_count") >= 5
        assert f.metric("penstock_loop_lag_seconds_sum") < 0.001
