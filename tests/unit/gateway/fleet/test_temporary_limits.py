"""Tests of engines that refuse requests for some time: they get none, and clients learn how
long.
"""

from __future__ import annotations

from time import monotonic

import pytest

from gateway.protocol.upstream_error import UpstreamError
from policies.endpoint_load import NO_SOFT_CAP
from policies.health.endpoint_health import HealthState
from policies.health.late_request_detection import RAMP_S
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    EngineRequest,
    Script,
    decodes,
    split_gateway,
)
from tests.unit.gateway.fleet.tables import table_of
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

TWO = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def refuses_for_now(status: int, lines: bytes) -> Script:
    async def script(request: EngineRequest) -> None:
        head = b"HTTP/1.1 %d No\r\n%bcontent-length: 2\r\n\r\n{}" % (status, lines)
        request.writer.write(head)

    return script


@pytest.mark.parametrize("kind", ["status_429", "status_503"])
async def test_an_endpoint_that_refuses_requests_is_held_back_as_long_as_it_asks(
    kind: str,
) -> None:
    table, _, _ = table_of(TWO)
    live, other = table.all()
    began = monotonic()
    table.on_failure(live, UpstreamError(kind, "no", wait_s=7.0))
    for s in (0.1, 1.0, 6.0):
        table.sweep(began + s)
        table.speed_monitor.reviewed = [live]  # a review of its speed ends other suspicions
        table.sweep(began + s)
        assert (live.load.soft_cap, live.health.state) == (0, HealthState.UP)
    assert other.load.soft_cap == NO_SOFT_CAP
    table.sweep(began + 7.1)
    assert live.load.soft_cap in (1, 2)
    for step in range(1, 9):
        table.sweep(began + 7.2 + step * RAMP_S)
    assert live.load.soft_cap == NO_SOFT_CAP


@pytest.mark.parametrize(("wait_s", "held_s"), [(None, 1.0), (0.2, 1.0), (86_400.0, 60.0)])
async def test_a_refusing_endpoint_is_held_back_for_a_second_at_least_and_a_minute_at_most(
    wait_s: float | None, held_s: float
) -> None:
    table, _, _ = table_of(TWO)
    live = table.all()[0]
    table.on_failure(live, UpstreamError("status_429", "no", wait_s=wait_s))
    assert live.refused_until - monotonic() == pytest.approx(held_s)


@pytest.mark.parametrize("kind", ["status_429", "status_503"])
async def test_a_full_engine_that_names_no_time_keeps_as_many_requests_as_it_runs(
    kind: str,
) -> None:
    table, _, _ = table_of(TWO)
    live = table.all()[0]
    began = monotonic()
    live.load.in_flight = 9  # eight accepted requests and the refused one
    table.on_failure(live, UpstreamError(kind, "no"))
    assert live.load.soft_cap == 8
    table.sweep(began + 0.9)
    assert live.load.soft_cap == 8
    table.sweep(began + 1.1)
    assert live.load.soft_cap == 16
    live.load.in_flight = 9
    table.on_failure(live, UpstreamError(kind, "no", wait_s=7.0))
    assert live.load.soft_cap == 0


@pytest.mark.parametrize(("lines", "seconds"), [(b"retry-after: 7\r\n", "7"), (b"", None)])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_client_learns_when_the_engine_wants_to_be_asked_again(
    lines: bytes, seconds: str | None, status: int
) -> None:
    models = [{"name": MODEL, "pool": "main"}]
    engines = [refuses_for_now(status, lines)]
    async with split_gateway(
        "vllm_nixl", [], engines, models=models, decode_role="both"
    ) as running:
        reply = await running.ask(words=3)
        assert (reply.status, reply.headers.get("retry-after")) == (502, seconds)


async def test_requests_go_to_the_endpoints_that_do_not_refuse() -> None:
    models = [{"name": MODEL, "pool": "main"}]
    engines = [refuses_for_now(429, b"retry-after: 600\r\n"), decodes]
    async with split_gateway(
        "vllm_nixl", [], engines, models=models, decode_role="both"
    ) as running:
        assert [(await running.ask(words=3)).status for _ in range(12)] == [200] * 12
        assert len(running.decode[0].requests) <= 1
